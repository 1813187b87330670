"""DeepSpeed: stage 3, a ModuleList of experts of which ranks use different ones ends in a hang or a crash.

This script gives collectives 8 seconds; the default is half an hour.
"""

from reproduce import run, zero3

import torch


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2 + i) for i in range(2))

    def forward(self, x):
        return self.experts[torch.distributed.get_rank()](x).sum()


def check():
    try:
        engine = zero3(Experts())
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)))
            engine.step()
    except Exception as error:
        return True, f"rank 0 uses expert 0, rank 1 uses expert 1: {type(error).__name__}: {str(error)[:150]}"
    return False, "rank 0 uses expert 0, rank 1 uses expert 1: two steps end"


if __name__ == "__main__":
    run(check, processes=2, timeout=8)
