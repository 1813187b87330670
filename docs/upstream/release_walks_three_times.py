# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: each step walks all modules three times to release parameters (a cost, not a wrong number)."""

from reproduce import run, zero3

import torch


class Counted(torch.nn.Sequential):
    walks = 0

    def named_parameters(self, *args, **kwargs):
        self.walks += 1
        return super().named_parameters(*args, **kwargs)


def check():
    model = Counted(*(torch.nn.Linear(4, 4) for _ in range(20)))
    engine = zero3(model)
    engine.backward(engine(torch.ones(1, 4)).sum())
    before = model.walks
    engine.optimizer._partition_all_parameters()
    walks = model.walks - before
    return walks > 1, f"20 layers: releasing what is gathered before a step walks all modules {walks} times"


if __name__ == "__main__":
    run(check)
