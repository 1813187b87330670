# SPDX-License-Identifier: Apache-2.0
"""Lightning: a resume from a checkpoint saved after a batch leaves out the validation due after that batch."""

from reproduce import run

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.validated_at = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.validated_at.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check():
    seen = []
    for checkpoint in (None, "saved/epoch=0-step=2.ckpt"):
        saving = ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy="auto",
            max_epochs=1,
            val_check_interval=2,
            num_sanity_val_steps=0,
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
        )
        module, data = Module(), DataLoader(torch.ones(4, 1))
        trainer.fit(module, data, DataLoader(torch.ones(1, 1)), ckpt_path=checkpoint)
        seen.append(module.validated_at)
    uninterrupted, resumed = seen
    return resumed != uninterrupted, (
        f"validations at steps {uninterrupted}; resumed from the checkpoint that was saved at step 2, before the "
        f"validation there: {resumed}"
    )


if __name__ == "__main__":
    run(check)
