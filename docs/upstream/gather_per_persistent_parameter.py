# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: the step gathers persistent parameters by one all-gather each (a cost, not a wrong number)."""

from reproduce import run, zero3

import torch


def check():
    layers = 20
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    engine = zero3(model, zero={"stage3_param_persistence_threshold": 1000})
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.step()
    counts = {
        event.key: event.count for event in profile.key_averages() if "gather" in event.key and "gloo" in event.key
    }
    persistent = len(engine.optimizer.persistent_parameters)
    gathers = sum(counts.values())
    return gathers >= persistent, f"{persistent} persistent parameters of one dtype and group: a step makes {counts}"


if __name__ == "__main__":
    run(check, processes=2)
