# SPDX-License-Identifier: Apache-2.0
"""Lightning: fit, test, ``save_checkpoint`` fails, because test leaves an inference engine that can't save."""

from reproduce import run, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def test_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    module, fitted = Module(), trainer(max_steps=1)
    batches = DataLoader(torch.ones(1, 1))
    fitted.fit(module, batches)
    fitted.test(module, batches, verbose=False)
    try:
        fitted.save_checkpoint("after_test")
    except AttributeError as error:
        return True, f"fit, test, save_checkpoint raises AttributeError: {error}"
    return False, "fit, test, save_checkpoint saves"


if __name__ == "__main__":
    run(check)
