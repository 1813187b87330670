# SPDX-License-Identifier: Apache-2.0
"""Lightning: after a resume within an epoch, a plain DataLoader begins anew: some batches come twice, others never."""

from reproduce import run

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(int(batch))
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and not self.trainer.ckpt_path:
            self.trainer.save_checkpoint("middle.ckpt")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check():
    seen = []
    for checkpoint in (None, "middle.ckpt"):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy="auto",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Module()
        trainer.fit(module, DataLoader(torch.arange(4.0).reshape(4, 1)), ckpt_path=checkpoint)
        seen.append(module.seen)
    whole, resumed = seen
    return resumed != whole[
        2:
    ], f"an epoch has the batches {whole}; resumed after the second one it goes on with {resumed}"


if __name__ == "__main__":
    run(check)
