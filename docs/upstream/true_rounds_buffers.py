# SPDX-License-Identifier: Apache-2.0
"""Lightning: with "bf16-true" every buffer is rounded, also those that a model keeps in fp32."""

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), persistent=False)
        self.whole = self.inv_freq.clone()
        self.seen = None

    def training_step(self, batch, _):
        angle, whole = 4096 * self.inv_freq.float(), 4096 * self.whole
        self.seen = self.inv_freq.dtype, float((angle - whole).abs().max())
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    config = {
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    module = Module()
    trainer(stage_3(config=config), max_steps=1, precision="bf16-true").fit(module, DataLoader(torch.ones(1, 1)))
    dtype, difference = module.seen
    return dtype != torch.float32, (
        f'a rotary inv_freq made in float32 is {dtype} in training_step with "bf16-true"; at position 4096 angles are '
        f"off by up to {difference:.2f} radians"
    )


if __name__ == "__main__":
    run(check)
