# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed 0.19.7 and older: a step whose gradient norm is NaN is applied, outside of fp16."""

from reproduce import run, weight_of, zero3

import torch


def check():
    engine = zero3(torch.nn.Linear(1, 1, bias=False))
    engine.backward(engine(torch.ones(1, 1)).sum() * float("nan"))
    engine.step()
    weight = float(weight_of(engine.module.weight))
    return (
        weight != weight,
        f"after a step with a NaN gradient the weight is {weight:.4f}, skipped_steps {engine.skipped_steps}",
    )


if __name__ == "__main__":
    run(check)
