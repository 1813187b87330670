# SPDX-License-Identifier: Apache-2.0
"""Lightning: it counts micro-batches within an epoch, DeepSpeed's engine counts across epochs."""

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.hooks = 0

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def on_before_optimizer_step(self, optimizer):
        self.hooks += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    seen = []
    for strategy in ("auto", stage_3()):
        module = Module()
        fitted = trainer(strategy, max_epochs=2, accumulate_grad_batches=2)
        fitted.fit(module, DataLoader(torch.ones(5, 1)))
        seen.append((fitted.global_step, module.hooks))
    engine = fitted.strategy.model.global_steps
    (plain, plain_hooks), (steps, hooks) = seen
    return {steps, engine} != {plain}, (
        f"2 epochs of 5 batches, accumulate_grad_batches=2: global_step {steps}, the engine's global_steps {engine}, "
        f'on_before_optimizer_step {hooks} times; strategy="auto": {plain} steps, {plain_hooks} times'
    )


if __name__ == "__main__":
    run(check)
