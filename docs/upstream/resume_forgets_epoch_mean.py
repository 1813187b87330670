# SPDX-License-Identifier: Apache-2.0
"""Lightning: after a resume within an epoch, the epoch's logged mean is one over the batches after the resume."""

from reproduce import run

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("value", float(batch_idx), on_step=False, on_epoch=True)
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and not self.trainer.ckpt_path:
            self.trainer.save_checkpoint("middle.ckpt")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check():
    means = []
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
        trainer.fit(Module(), DataLoader(torch.ones(4, 1)), ckpt_path=checkpoint)
        means.append(trainer.callback_metrics["value"].item())
    return means[0] != means[1], (
        f"4 batches that log 0 to 3: their mean over the epoch is {means[0]}, "
        f"in a fit that is resumed after the second one {means[1]}"
    )


if __name__ == "__main__":
    run(check)
