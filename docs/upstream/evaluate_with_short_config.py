# SPDX-License-Identifier: Apache-2.0
"""Lightning: evaluation at stage 3 asks the user's config for a key that training doesn't need."""

from reproduce import run, stage_3, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def validation_step(self, batch, _):
        self.layer(batch)


def check():
    strategy = stage_3(config={"zero_optimization": {"stage": 3}})
    try:
        trainer(strategy).validate(Module(), DataLoader(torch.ones(1, 1)), verbose=False)
    except KeyError as error:
        return True, f"validate with config={{'zero_optimization': {{'stage': 3}}}} raises KeyError: {error}"
    return False, "validate with config={'zero_optimization': {'stage': 3}} works"


if __name__ == "__main__":
    run(check)
