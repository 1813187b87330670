# SPDX-License-Identifier: Apache-2.0
"""A plain Trainer as the reference: the same module, the same global batches in the same order, no sharding."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.fits import QUIET, Pairs, Regression

BATCHES = 5


class Watched(Regression):
    """SGD with a scheduler per step, and a record of what Lightning's hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.steps: list[int] = []
        # Norms of steps, before clipping: the plain Trainer's gradients, the engine's own figure.
        self.norms: list[float] = []
        self.before_step = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.before_step += 1
        if not is_sharded(self):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_start(self) -> None:
        self.global_step_at_start = self.trainer.global_step

    def on_train_batch_end(self, *_: Any) -> None:
        if is_sharded(self) and self.trainer.global_step != (self.steps or [self.global_step_at_start])[-1]:
            self.norms.append(float(self.trainer.strategy.model.get_global_grad_norm()))
        self.steps.append(self.trainer.global_step)
        self.rates.append(self.lr_schedulers().get_last_lr()[0])


def is_sharded(module: pl.LightningModule) -> bool:
    return hasattr(next(module.parameters()), "ds_id")


def run(
    strategy: Any,
    module: pl.LightningModule,
    *,
    epochs: int = 2,
    batches: int = BATCHES,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Fit on this world's batches, or in one plain process on all of them; returns the trainer."""
    world = torch.distributed.get_world_size()
    plain = strategy == "auto"
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "devices": 1 if plain else world,
            "max_epochs": epochs,
            "use_distributed_sampler": False,
            **QUIET,
            **options,
        }
    )
    data = Pairs(length=2 * world * batches)
    # Lightning's own sampler shuffles.
    sampler = None if plain else DistributedSampler(data, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=2 * world if plain else 2, sampler=sampler), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    """Whole fp32 weights, of masters where there are some."""
    import deepspeed

    parameters = list(trainer.lightning_module.parameters())
    if is_sharded(trainer.lightning_module):
        return [deepspeed.utils.safe_get_full_fp32_param(p) for p in parameters]
    return [p.detach() for p in parameters]


def compared(ours: Any, plain: Any) -> dict[str, Any]:
    """What a test asserts of two finished fits; pairs are (ours, plain)."""
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(weights(ours), weights(plain), strict=True))
    pairs = {
        name: (getattr(ours.lightning_module, name), getattr(plain.lightning_module, name))
        for name in ("steps", "rates", "norms", "before_step", "losses")
    }
    return {"worst": worst, "engine": ours.strategy.model.global_steps, **pairs}
