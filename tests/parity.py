# SPDX-License-Identifier: Apache-2.0
"""A model trained through a Trainer beside plain Transformers: what both compute from the same batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe import verify
from lightning_zero3.topology import Topology
from tests.fits import Language, Sentences, fit
from tests.models import build


class Observed(Language):
    """Takes the batch of its data-parallel rank, and keeps what the model made of it and every gradient."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, **arguments: Any) -> None:
        super().__init__(nn.ModuleDict({"at": nn.ModuleDict({"depth": model})}), lr=0.0)
        self.batch, self.arguments = batch, arguments
        self.seen: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, self.seen = verify.loss_and_outputs(self.some_odd_name["at"]["depth"], self.batch, **self.arguments)
        return loss

    def on_after_backward(self) -> None:
        self.seen |= verify.gradients_of(self.some_odd_name["at"]["depth"])


def batch_of(data_parallel_rank: int) -> torch.Tensor:
    """Token ids of one data-parallel rank."""
    return torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(100 + data_parallel_rank))


def relative_errors(
    config: Any,
    options: dict[str, Any],
    arguments: dict[str, Any],
    seed: int = 0,
) -> dict[str, float]:
    """Train one step with the given options of the strategy, and compare everything with plain Transformers.

    Args:
        config: Of a model that ``tests.models.build`` builds.
        options: Of ``Zero3FastStrategy``.
        arguments: For the model's forward.
        seed: Of this rank's values; the reference has 0.

    Returns:
        As :func:`lightning_zero3.moe.verify.relative_errors`.
    """
    world, rank = distributed.get_world_size(), distributed.get_rank()
    layout = Topology(world, options.get("expert_parallel_size") or 1, options.get("tensor_parallel_size") or 1)
    lane, lanes = layout.data_parallel_rank(rank), layout.data_parallel_size
    module = Observed(build(config, seed), batch_of(lane), **arguments)
    fit(module, Sentences(64), Zero3FastStrategy(**options), steps=1)
    theirs = verify.plain(build(config), [batch_of(each) for each in range(lanes)], lanes, lane, **arguments)
    return verify.relative_errors(module.seen, theirs, layout, rank)
