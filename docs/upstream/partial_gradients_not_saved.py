# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: a checkpoint between the micro-batches of one step holds neither gradients nor the micro-step."""

from reproduce import run, weight_of, zero3

import torch


def engine_of_two():
    torch.manual_seed(0)
    return zero3(torch.nn.Linear(1, 1, bias=False), gradient_accumulation_steps=2)


def micro_batch(engine, gradient):
    engine.backward(engine(torch.full((1, 1), gradient)).sum())
    engine.step()


def moved(engine, before):
    return round(before - float(weight_of(engine.module.weight)), 4)


def check():
    engine = engine_of_two()
    before = float(weight_of(engine.module.weight))
    micro_batch(engine, 1.0)
    engine.save_checkpoint("checkpoint")
    micro_batch(engine, 3.0)
    through, again = moved(engine, before), engine_of_two()
    again.load_checkpoint("checkpoint")
    micro_steps = again.micro_steps
    micro_batch(again, 3.0)
    resumed = moved(again, before)
    return resumed != through, (
        f"gradients 1 and 3, accumulated, a rate of 0.1: the weight moves by {through}; saved and loaded between the "
        f"two it moves by {resumed} (micro_steps is {micro_steps} after loading)"
    )


if __name__ == "__main__":
    run(check)
