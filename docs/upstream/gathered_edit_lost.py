# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: an edit under ``GatheredParameters(..., modifier_rank=0)`` misses the master, so a step undoes it."""

from reproduce import run, weight_of, zero3

import deepspeed
import torch


def check():
    engine = zero3(torch.nn.Linear(2, 2, bias=False), zero={"stage": 3})
    parameter = engine.module.weight
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.fill_(0.5)
    written = float(weight_of(parameter)[0, 0])
    master = float(deepspeed.utils.safe_get_full_fp32_param(parameter)[0, 0])
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    after = float(weight_of(parameter)[0, 0])
    return master != 0.5 or after != 0.5, (
        f"0.5 written: the weight is {written:g}, the master {master:.4f}; after a step with a rate of 0 the weight is "
        f"{after:.4f}"
    )


if __name__ == "__main__":
    run(check)
