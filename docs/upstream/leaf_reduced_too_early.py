# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: a leaf module called by keyword, or with an input that needs no gradient, fails in backward."""

from reproduce import run, zero3

import deepspeed
import torch


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, hidden):
        return sum(expert(hidden) for expert in self.experts)


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.before = torch.nn.Linear(4, 4, bias=False)
        self.moe = Experts()
        self.call = call

    def forward(self, x):
        if self.call == "by position":
            return self.moe(self.before(x)).sum()
        if self.call == "by keyword":
            return self.moe(hidden=self.before(x)).sum()
        return self.moe(x).sum() + self.before(x).sum()


def backward(call):
    model = Model(call)
    deepspeed.utils.set_z3_leaf_module(model.moe, True)
    engine = zero3(model)
    try:
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()
    except Exception as raised:
        return f"{type(raised).__name__}: {str(raised).splitlines()[0][:90]}"
    return "trains"


def check():
    seen = {call: backward(call) for call in ("by position", "by keyword", "with an input that needs no gradient")}
    return set(seen.values()) != {"trains"}, "a leaf called " + "; ".join(f"{call}: {s}" for call, s in seen.items())


if __name__ == "__main__":
    run(check)
