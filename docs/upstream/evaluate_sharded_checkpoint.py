# SPDX-License-Identifier: Apache-2.0
"""Lightning: ``validate(ckpt_path=...)`` of a sharded checkpoint fails in a fresh Trainer, and after a fit."""

from reproduce import run, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self, value):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, value)
        self.seen = None

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def validation_step(self, batch, _):
        self.seen = float(self.layer(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def check():
    batches = DataLoader(torch.ones(1, 1))
    fitted = trainer(max_steps=1)
    fitted.fit(Module(3.0), batches)
    fitted.save_checkpoint("sharded")
    module = Module(0.0)
    try:
        trainer().validate(module, batches, ckpt_path="sharded", verbose=False)
    except Exception as error:
        return True, f"validate(ckpt_path=...) raises {type(error).__name__}: {error}"
    return module.seen != 3.0, f"validate(ckpt_path=...) sees a weight of {module.seen} where 3.0 was saved"


if __name__ == "__main__":
    run(check)
