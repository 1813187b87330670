# SPDX-License-Identifier: Apache-2.0
"""Lightning: ``self.optimizers().zero_grad()`` runs with the wrapper as ``self`` and clears nothing under stage 3."""

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

GRADIENTS = (10.0, 10.0, 1.0)


class Module(pl.LightningModule):
    """Drops the gradients of two batches, of 10 each, and makes a step with the third's, of 1."""

    def __init__(self, of_wrapper):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.of_wrapper = of_wrapper
        self.moved = 0.0

    def training_step(self, batch, batch_idx):
        wrapper = self.optimizers()
        self.manual_backward((GRADIENTS[batch_idx] * self.layer(batch)).sum())
        if batch_idx == 1:
            (wrapper if self.of_wrapper else wrapper.optimizer).zero_grad()
        if batch_idx == 2:
            wrapper.step()
            self.moved = abs(float(self.layer(torch.ones(1, 1))))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def movement(strategy, of_wrapper):
    module = Module(of_wrapper)
    trainer(strategy, max_epochs=1).fit(module, DataLoader(torch.ones(3, 1)))
    return module.moved


def sharded():
    config = {
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return stage_3(config=config)


def check():
    plain, by_wrapper, by_optimizer = movement("auto", True), movement(sharded(), True), movement(sharded(), False)
    return by_wrapper != plain, (
        "gradients 10 and 10, zero_grad, gradient 1, a step with a rate of 1: the weight moves by "
        f'{plain:g} with strategy="auto", by {by_wrapper:g} under stage 3 with self.optimizers().zero_grad(), by '
        f"{by_optimizer:g} with self.optimizers().optimizer.zero_grad()"
    )


if __name__ == "__main__":
    run(check)
