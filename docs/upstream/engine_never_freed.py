# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: a Stage-3 engine that was destroyed and that nobody holds stays, with masters, moments and gradients."""

import gc
import weakref

from reproduce import run, zero3

import torch


def check():
    engine = zero3(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    optimizer = weakref.ref(engine.optimizer)
    master = engine.optimizer.fp32_partitioned_groups_flat[0].untyped_storage()._weak_ref()
    engine.destroy()
    del engine
    gc.collect()
    alive = optimizer() is not None, not torch.UntypedStorage._expired(master)
    return any(
        alive
    ), f"destroyed, deleted and collected: the optimizer lives: {alive[0]}, its masters' memory: {alive[1]}"


if __name__ == "__main__":
    run(check)
