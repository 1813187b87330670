# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3, ``load_checkpoint(load_module_only=True)`` loads no weights, and raises nothing."""

from reproduce import run, weight_of, zero3

import deepspeed
import torch


def linear(value):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def check():
    zero3(linear(3.0)).save_checkpoint("checkpoint")
    engine = zero3(linear(1.0))
    path, _ = engine.load_checkpoint("checkpoint", load_module_only=True)
    weight = float(weight_of(engine.module.weight))
    master = float(deepspeed.utils.safe_get_full_fp32_param(engine.module.weight))
    engine = zero3(linear(1.0))
    engine.load_checkpoint("checkpoint", load_module_only=True, load_optimizer_states=False)
    other = float(weight_of(engine.module.weight))
    return weight != 3.0 or master != 3.0, (
        f"saved 3, built with 1, load_module_only=True returned {path and 'a path'}: the weight is {weight:g}, the "
        f"master {master:g}; with load_optimizer_states=False as well the weight is {other:g}"
    )


if __name__ == "__main__":
    run(check)
