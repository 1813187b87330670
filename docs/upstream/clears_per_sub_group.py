# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed 0.19.7 and older: a step clears the gradients of all parameters once per sub-group."""

from reproduce import run, zero3

import torch


def check():
    layers = 20
    engine = zero3(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))), zero={"sub_group_size": 1})
    optimizer, clears = engine.optimizer, 0
    clear = optimizer.zero_grad

    def counted(*args, **kwargs):
        nonlocal clears
        clears += 1
        return clear(*args, **kwargs)

    engine.backward(engine(torch.ones(1, 4)).sum())
    optimizer.zero_grad = counted
    optimizer.step()
    groups, parameters = len(optimizer.fp16_groups), sum(map(len, optimizer.fp16_groups))
    return clears > 1, (
        f"{parameters} parameters in {groups} sub-groups: one step clears {clears} times, "
        f"which visits {clears * parameters} parameters"
    )


if __name__ == "__main__":
    run(check)
