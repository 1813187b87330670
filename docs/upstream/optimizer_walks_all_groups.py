# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: each sub-group's ``optimizer.step()`` walks all parameter groups, so a step is quadratic in them (a cost).

AutoEP makes a parameter group of each sub-group, 136 of GLM-4.5-Air's.
"""

import sys

from reproduce import run, zero3

import torch


def check():
    layers = 20
    adamw_module = sys.modules[
        torch.optim.AdamW.__module__.replace("adamw", "adam")
    ]  # "torch.optim.adam" names a class
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    engine = zero3(model, optimizer)
    engine.backward(engine(torch.ones(1, 4)).sum())
    calls, adam = 0, adamw_module.adam

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return adam(*args, **kwargs)

    adamw_module.adam = counted
    try:
        engine.step()
    finally:
        adamw_module.adam = adam
    return calls > layers, f"{layers} parameter groups of one tensor each: a step calls torch's adam() {calls} times"


if __name__ == "__main__":
    run(check)
