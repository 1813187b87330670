# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3, a checkpoint loads by position into an optimizer whose parameters are in another order."""

from reproduce import run, weight_of, zero3

import torch


def two(reverse):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    for value, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, value + 1.0)
    parameters = list(model.parameters())
    return model, torch.optim.SGD(parameters[::-1] if reverse else parameters, lr=0.0)


def check():
    model, optimizer = two(reverse=False)
    zero3(model, optimizer).save_checkpoint("checkpoint")
    model, optimizer = two(reverse=True)
    engine = zero3(model, optimizer)
    text = (
        "two layers with weights 1 and 2, saved; loaded into an optimizer with the same parameters in reverse order: "
    )
    try:
        path, _ = engine.load_checkpoint("checkpoint")
    except Exception as error:
        return False, f"{text}{type(error).__name__}"
    seen = [float(weight_of(layer.weight).reshape(-1)[0]) for layer in engine.module]
    return seen != [1.0, 2.0], (
        f"{text}{'a path' if path else None} is returned, the weights are {seen[0]:g} and {seen[1]:g}"
    )


if __name__ == "__main__":
    run(check)
