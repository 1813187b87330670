# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: of several ``engine.backward`` calls within one micro-step only the last gradient counts, silently."""

from reproduce import run, weight_of, zero3

import torch


def check():
    moved = {}
    for stage in (2, 3):
        engine = zero3(torch.nn.Linear(1, 1, bias=False), zero={"stage": stage})
        before = float(weight_of(engine.module.weight))
        losses = engine(torch.ones(2, 1))
        engine.backward(losses[0].sum(), retain_graph=True)
        engine.backward(losses[1].sum())
        engine.step()
        moved[stage] = round(before - float(weight_of(engine.module.weight)), 4)
    return moved[3] != 0.2, (
        f"two backwards of gradient 1 each, a rate of 0.1: the weight moves by {moved[3]:g} at stage 3 and by "
        f"{moved[2]:g} at stage 2; the sum's is 0.2"
    )


if __name__ == "__main__":
    run(check)
