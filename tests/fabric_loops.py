# SPDX-License-Identifier: Apache-2.0
"""A training loop as a user of Fabric writes it, for functions that run on ranks."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset

from tests.fits import STEPS


def fabric_of(strategy: Any, kind: Any = Fabric, **options: Any) -> Any:
    """A Fabric on CPUs with a process for each rank that there is, launched."""
    fabric = kind(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            **options,
        }
    )
    fabric.launch()
    return fabric


def optimizer_and_scheduler(module: pl.LightningModule) -> tuple[Any, Any]:
    """What a module configures, with or without a scheduler."""
    configured = module.configure_optimizers()
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]


def train(
    module: pl.LightningModule,
    data: Dataset,
    strategy: Any,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    clip: float | None = None,
    kind: Any = Fabric,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Train for a few steps, gradients added up as the documentation of Fabric adds them up.

    Returns:
        The Fabric, and the model and the optimizer as it has wrapped them.
    """
    fabric = fabric_of(strategy, kind, **options)
    optimizer, scheduler = optimizer_and_scheduler(module)
    model, optimizer = fabric.setup(module, optimizer)
    # As a Trainer samples: it shuffles what is trained on.
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    counts = fabric.strategy.model.gradient_accumulation_steps() > 1
    for index, batch in enumerate(itertools.islice(loader, steps * accumulate)):
        last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last and not counts):
            loss = model.training_step(batch, index)
            fabric.backward(loss if counts or accumulate == 1 else loss / accumulate)
        if clip is not None and last:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        if last or counts:
            optimizer.step()
            optimizer.zero_grad()
        if last and scheduler is not None:
            scheduler.step()
    return fabric, model, optimizer
