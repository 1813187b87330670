# SPDX-License-Identifier: Apache-2.0
"""One training step with ``zero3_fast``, in one process, as any user's Trainer would take it."""

from __future__ import annotations

import math
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  (registers the strategy)
from lightning_zero3.optimizer.stage3 import FastStage3Optimizer


class _Line(pl.LightningModule):
    """A linear layer that learns from eight fixed samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.loss = math.nan

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        (x,) = batch
        loss: torch.Tensor = (self.layer(x) - 1).square().mean()
        self.loss = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_one_step() -> dict[str, Any]:
    """Train, and look at what came out.

    Returns:
        ``loss``, ``moved`` (the largest change of a master weight), ``accelerator``, ``optimizer``, ``seconds``.

    Raises:
        RuntimeError: It trained, but with another optimizer or without a change of the weights.
    """
    started = time.perf_counter()
    pl.seed_everything(0, verbose=False)
    module = _Line()
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy="zero3_fast",
            accelerator="cuda" if cuda else "cpu",
            devices=1,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.arange(64.0).view(8, 8) / 64), batch_size=8))
    engine: Any = trainer.strategy.model
    optimizer = engine.optimizer
    masters = torch.cat([master.detach().flatten().cpu() for master in optimizer.fp32_partitioned_groups_flat])
    moved = (masters[: before.numel()] - before).abs().max().item()
    if not isinstance(optimizer, FastStage3Optimizer):
        raise RuntimeError(f"It trained with {type(optimizer).__name__}, not with FastStage3Optimizer.")
    if trainer.global_step != 1 or not math.isfinite(module.loss) or not 0 < moved < 1:
        raise RuntimeError(f"Steps: {trainer.global_step}, loss: {module.loss}, weights moved by: {moved}.")
    return {
        "loss": module.loss,
        "moved": moved,
        "accelerator": "cuda" if cuda else "cpu",
        "optimizer": type(optimizer).__mro__[1].__name__,
        "seconds": round(time.perf_counter() - started, 2),
    }
