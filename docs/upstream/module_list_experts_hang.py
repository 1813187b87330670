# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3, a ModuleList of experts of which ranks use different ones: a hang, a crash or another's weights.

This script gives collectives 8 seconds; the default is half an hour.
"""

from reproduce import run, zero3

import torch


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(2))
        for value, expert in enumerate(self.experts, 1):
            torch.nn.init.constant_(expert.weight, value)

    def forward(self, x, chosen):
        return sum(self.experts[i](x) for i in chosen).sum()


def check():
    engine, rank = zero3(Experts()), torch.distributed.get_rank()
    # Rank 0 uses expert 0 (whose weights are 1), rank 1 uses expert 1.
    wrong = float(engine(torch.ones(1, 2), [rank]))
    try:
        # Rank 0 uses one expert, rank 1 uses two.
        engine.backward(engine(torch.ones(1, 2), range(rank + 1)))
        engine.step()
        torch.distributed.barrier()
        seen = "ends"
    except Exception as error:
        seen = f"{type(error).__name__}: {str(error).partition('] ')[2][:25]}"
    return wrong != 2.0 or seen != "ends", (
        f"rank 0 uses expert 0, rank 1 uses expert 1: rank 0's forward gives {wrong:g} where its weights give 2; "
        f"rank 0 uses one expert and rank 1 two: {seen}"
    )


if __name__ == "__main__":
    run(check, processes=2, timeout=8)
