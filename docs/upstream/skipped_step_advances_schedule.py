# SPDX-License-Identifier: Apache-2.0
"""Lightning: after a step that the engine skips, the learning-rate scheduler and ``global_step`` go on."""

from reproduce import CannotTellError, run, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def check():
    fitted = trainer(max_steps=1, max_epochs=1)
    fitted.fit(Module(), DataLoader(torch.full((1, 1), float("inf"))))
    skipped = fitted.strategy.model.skipped_steps
    if not skipped:
        raise CannotTellError("this DeepSpeed applies a step with a non-finite gradient outside of fp16")
    rate = fitted.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
    return rate != 1.0 or fitted.global_step != 0, (
        f"1 step, its gradient infinite, skipped_steps {skipped}: the learning rate went from 1 to {rate:g}, "
        f"global_step is {fitted.global_step}"
    )


if __name__ == "__main__":
    run(check)
