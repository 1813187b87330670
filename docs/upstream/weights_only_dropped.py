# SPDX-License-Identifier: Apache-2.0
"""Lightning: with DeepSpeed, ``weights_only`` of fit, validate, test and predict doesn't reach the strategy."""

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check():
    seen = []
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    first = trainer(max_steps=1)
    first.fit(Module(), loader)
    first.save_checkpoint("checkpoint")
    strategy = stage_3()
    load = strategy.load_checkpoint

    def watched(path, weights_only=None):
        seen.append(weights_only)
        return load(path, weights_only)

    strategy.load_checkpoint = watched
    trainer(strategy, max_steps=2).fit(Module(), loader, ckpt_path="checkpoint", weights_only=True)
    return seen == [None], f"fit(..., weights_only=True) calls load_checkpoint(..., weights_only={seen[0]})"


if __name__ == "__main__":
    run(check)
