# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: the gradient norm takes an all-reduce per sub-group (a cost, not a wrong number)."""

from reproduce import run, zero3

import torch


def check():
    layers = 20
    engine = zero3(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))), zero={"sub_group_size": 1})
    engine.backward(engine(torch.ones(1, 4)).sum())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.step()
    reductions = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
    groups = len(engine.optimizer.fp16_groups)
    return reductions >= groups, f"{groups} sub-groups, 2 ranks: a step makes {reductions} all-reduces of one number"


if __name__ == "__main__":
    run(check, processes=2)
