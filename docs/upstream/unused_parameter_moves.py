# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3, a trainable parameter that a step doesn't use moves by its previous gradient."""

from reproduce import run, weight_of, zero3

import torch


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(1, 1, bias=False)
        self.b = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x, use_b):
        return (self.a(x) + self.b(x) if use_b else self.a(x)).sum()


def check():
    movements = {}
    for stage in (2, 3):
        torch.manual_seed(0)
        engine = zero3(Branches(), zero={"stage": stage})
        movements[stage] = []
        for use_b in (True, False, True, False):
            before = float(weight_of(engine.module.b.weight))
            engine.backward(engine(torch.ones(1, 1), use_b))
            engine.step()
            movements[stage].append(round(before - float(weight_of(engine.module.b.weight)), 4))
    return movements[3] != movements[2], (
        f"a layer used in steps 1 and 3, not in 2 and 4, moves by {movements[3]} at stage 3 and by {movements[2]} "
        "at stage 2 (SGD, rate 0.1, gradient 1)"
    )


if __name__ == "__main__":
    run(check)
