# SPDX-License-Identifier: Apache-2.0
"""Lightning: ``DeepSpeedStrategy(config=...)`` writes into the caller's dict, so it can't be used twice."""

from reproduce import run, stage_3, trainer

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
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    config = {
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    before, error = set(config), None
    for _ in range(2):
        try:
            trainer(stage_3(config=config), max_steps=1).fit(Module(), DataLoader(torch.ones(1, 1)))
        except Exception as raised:
            error = raised
    added = sorted(set(config) - before)
    seen = f"the second fit raised {type(error).__name__}: {str(error)[:70]}..." if error else "the second fit ran"
    return bool(added), f"after a fit the caller's dict has {', '.join(added) or 'nothing'} added; {seen}"


if __name__ == "__main__":
    run(check)
