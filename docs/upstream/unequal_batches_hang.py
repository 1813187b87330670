# SPDX-License-Identifier: Apache-2.0
"""Lightning: ranks with different numbers of batches hang under stage 3 until a time-out that explains nothing."""

import time

from reproduce import run, stage_3

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

TIMEOUT = 8


class Stream(IterableDataset):
    """Two batches on rank 0, one on rank 1."""

    def __iter__(self):
        return iter(torch.ones(2 - torch.distributed.get_rank(), 1))


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
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=stage_3(config=config),
        accelerator="cpu",
        devices=2,
        enable_model_summary=False,
        max_epochs=1,
        **quiet,
    )
    began, error = time.monotonic(), None
    try:
        trainer.fit(Module(), DataLoader(Stream()))
    except Exception as raised:
        error = raised
    waited = time.monotonic() - began
    if torch.distributed.get_rank() != 0:
        time.sleep(60)  # its connections stay open; rank 0 ends it
    said = str(error).splitlines()[0].rsplit("] ", 1)[-1][:90] if error else "nothing"
    explains = "batches" in str(error)
    return (error is not None or waited >= TIMEOUT) and not explains, (
        f"2 batches on rank 0, 1 on rank 1, gloo's time-out {TIMEOUT} seconds: "
        f"{'a wait of that long, then' if waited >= TIMEOUT else 'no wait, then'} {type(error).__name__}: {said}"
    )


if __name__ == "__main__":
    run(check, processes=2, timeout=TIMEOUT)
