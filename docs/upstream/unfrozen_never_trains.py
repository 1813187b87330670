# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3, a parameter frozen at ``initialize`` and unfrozen later never trains, and nothing says so."""

from reproduce import run, weight_of, zero3

import torch


def check():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[0].requires_grad_(False)
    engine = zero3(model)
    model[0].requires_grad_(True)
    before = [float(weight_of(layer.weight)) for layer in model]
    error = None
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
    except Exception as raised:
        error = raised
    moved = [abs(float(weight_of(layer.weight)) - b) for layer, b in zip(model, before, strict=True)]
    if error is not None:
        return False, f"a step after unfreezing raises {type(error).__name__}: {error}"
    return moved[0] == 0, f"3 steps after unfreezing: it moved by {moved[0]:g}, the layer beside it by {moved[1]:.3f}"


if __name__ == "__main__":
    run(check)
