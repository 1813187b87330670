# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: after ``safe_set_full_fp32_param`` forwards go on with the old weight until the next step."""

from reproduce import run, weight_of, zero3

import deepspeed
import torch


def check():
    engine = zero3(torch.nn.Linear(2, 2, bias=False))
    parameter = engine.module.weight
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    deepspeed.utils.safe_set_full_fp32_param(parameter, torch.full((2, 2), 0.5))
    master = float(deepspeed.utils.safe_get_full_fp32_param(parameter)[0, 0])
    weight, forward = float(weight_of(parameter)[0, 0]), engine(torch.ones(1, 2))
    engine.backward(forward.sum())
    engine.step()
    after = engine(torch.ones(1, 2))
    return float(forward[0, 0]) != 1.0, (
        f"0.5 set: the master is {master:g}, the weight {weight:.4f}; a forward of two ones gives "
        f"{float(forward[0, 0]):.4f}, after the next step {float(after[0, 0]):g}"
    )


if __name__ == "__main__":
    run(check)
