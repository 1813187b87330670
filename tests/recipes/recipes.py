# SPDX-License-Identifier: Apache-2.0
"""The recipes by name, and what tests do with any of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import glm45air
import lightning.pytorch as pl
import minimax_m3
import qwen35
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch.utils.data import DataLoader

from shared.run import make_module, make_strategy
from tests.fits import QUIET, Sentences

RECIPES: dict[str, ModuleType] = {"glm45air": glm45air, "qwen35": qwen35, "minimax_m3": minimax_m3}


def meta_model(module: ModuleType, config: Any) -> torch.nn.Module:
    """A recipe's model without memory."""
    with torch.device("meta"):
        return module.MODEL_CLASS(config)


class Observer(pl.Callback):
    """Keeps every micro-step's loss, and the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            for name, parameter in pl_module.named_parameters():
                self.gradients[name] = safe_get_full_grad(parameter).float().clone()


def observed(name: str, arguments: tuple[str, ...], ranks: int = 2) -> dict[str, Any]:
    """Train a recipe's tiny model for a few steps on this rank, with the recipe's own module and strategy.

    Returns:
        Losses, first gradients, calls of torch's attention, dtypes of masters and moments, numbers of sub-groups.
    """
    recipe = RECIPES[name].RECIPE
    settings = recipe.parse(["--sequence_length", "64", "--max_steps", "3", *arguments])
    config = recipe.config(settings)
    strategy = make_strategy(settings, expert_parallel_size=settings.expert_parallel_size or ranks)
    observer = Observer()
    trainer = pl.Trainer(
        **QUIET,
        strategy=strategy,
        devices=ranks,
        precision=settings.precision,
        max_steps=settings.steps,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        callbacks=[observer],
    )
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        trainer.fit(make_module(recipe, config, settings), DataLoader(Sentences(256, 64), batch_size=2))
    optimizer = trainer.strategy.model.optimizer
    states = next(iter(optimizer.optimizer.state.values()))
    return {
        "losses": observer.losses,
        "calls_of_torchs_attention": attention.call_count,
        "gradients": observer.gradients,
        "masters": str(optimizer.fp32_partitioned_groups_flat[0].dtype),
        "moments": str(states["exp_avg"].dtype),
        "sub_groups": len(optimizer.fp16_groups),
        "aliased": len(optimizer.aliased_sub_groups()),
    }
