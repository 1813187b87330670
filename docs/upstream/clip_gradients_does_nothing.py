# SPDX-License-Identifier: Apache-2.0
"""Lightning: ``self.clip_gradients(...)`` in manual optimization does nothing under DeepSpeed, without a word."""

import warnings

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.moved = 0.0

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).sum())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.moved = abs(float(self.layer(torch.ones(1, 1))))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def movement(strategy):
    module = Module()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer(strategy, max_steps=1).fit(module, DataLoader(torch.full((1, 1), 2.0)))
        except MisconfigurationException:
            return 0.0, True
    return module.moved, any("clip" in str(warning.message) for warning in said)


def check():
    config = {
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    (plain, _), (sharded, warned) = movement("auto"), movement(stage_3(config=config))
    return sharded != plain and not warned, (
        "a gradient of 2, clip_gradients(gradient_clip_val=0.5), a rate of 1: the weight moves by "
        f'{plain:g} with strategy="auto", by {sharded:g} with DeepSpeed; a warning or error: {warned}'
    )


if __name__ == "__main__":
    run(check)
