# SPDX-License-Identifier: Apache-2.0
"""What a user runs: a small fit through ``Trainer(strategy="zero3_fast")``, started by the tests in several ways.

Prints one JSON line per rank: global rank, world size, losses, the optimizer's class, the cluster environment.
"""

import json
import sys

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.fits import Pairs, Regression

if __name__ == "__main__":
    devices = int(sys.argv[1])
    trainer = pl.Trainer(
        strategy="zero3_fast",
        accelerator="cpu",
        devices=devices,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(Pairs(), batch_size=2))
    line = {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "losses": module.losses,
        "optimizer": type(trainer.strategy.model.optimizer).__name__,
        "environment": type(trainer.strategy.cluster_environment).__name__,
    }
    sys.stdout.write(f"\nRESULT {json.dumps(line)}\n")
