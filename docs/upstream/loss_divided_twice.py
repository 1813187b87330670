# SPDX-License-Identifier: Apache-2.0
"""Lightning: with ``accumulate_grad_batches=N`` the loss is divided by N twice."""

from reproduce import run, stage_3, trainer, weight_of

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, _):
        return self.layer(batch).sum()  # whose gradient is 1 for an input of 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    moved = []
    for strategy in ("auto", stage_3()):
        module = Module()
        trainer(strategy, max_steps=1, accumulate_grad_batches=2).fit(module, DataLoader(torch.ones(2, 1)))
        moved.append(-float(weight_of(module.layer.weight) if strategy != "auto" else module.layer.weight))
    plain, stage3 = moved
    return (
        stage3 != plain,
        f"two micro-batches with gradients of 1 and a rate of 1 move the weight by {stage3:g}; "
        f'strategy="auto" moves it by {plain:g}',
    )


if __name__ == "__main__":
    run(check)
