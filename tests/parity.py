"""A model trained through a Trainer beside plain Transformers: what both compute from the same batches."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from torch import distributed, nn

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.topology import Topology
from tests.fits import Language, Sentences, fit
from tests.models import build

# AutoEP's names → Transformers'.
_RENAMED = (
    (r"\.router\.gate\.", ".gate."),
    (r"\.shared_experts_gate\.", ".shared_expert_gate."),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
)


class Observed(Language):
    """Takes the batch of its data-parallel rank, and keeps what the model made of it and every gradient."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, **arguments: Any) -> None:
        super().__init__(nn.ModuleDict({"at": nn.ModuleDict({"depth": model})}), lr=0.0)
        self.batch, self.arguments = batch, arguments
        self.seen: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.some_odd_name["at"]["depth"](input_ids=self.batch, labels=self.batch, **self.arguments)
        self.seen = {
            name: out[name].detach().float() for name in ("loss", "aux_loss", "logits") if out.get(name) is not None
        }
        return out.loss

    def on_after_backward(self) -> None:
        prefix = "some_odd_name.at.depth."
        for name, parameter in self.named_parameters():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                self.seen[f"d {name.removeprefix(prefix)}"] = gradient.detach().float().clone()


def batch_of(data_parallel_rank: int) -> torch.Tensor:
    """Token ids of one data-parallel rank."""
    return torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(100 + data_parallel_rank))


def plain(config: Any, lanes: int, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    """What plain Transformers computes in one process: per data-parallel rank, gradients being means over all."""
    model = build(config)
    results = []
    for lane in range(lanes):
        batch = batch_of(lane)
        out = model(input_ids=batch, labels=batch, **arguments)
        (out.loss / lanes).backward()
        kept = ("loss", "aux_loss", "logits")
        results.append({name: out[name].detach() for name in kept if out.get(name) is not None})
    gradients = {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [{**result, **gradients} for result in results]


def whole(name: str, value: torch.Tensor, shape: torch.Size, layout: Topology) -> torch.Tensor:
    """A whole weight or its gradient, from the slices on all tensor-parallel ranks."""
    slices: list[Any] = [None] * layout.world_size
    distributed.all_gather_object(slices, value)
    mine = [slices[peer] for peer in layout.tensor_parallel_ranks(distributed.get_rank())]
    if value.shape == shape:
        return value
    (cut,) = (dim for dim in range(value.ndim) if value.shape[dim] != shape[dim])
    parts = [part.chunk(2 if "gate_up_proj" in name else 1, dim=cut) for part in mine]
    return torch.cat([half for halves in zip(*parts, strict=True) for half in halves], dim=cut)


def as_transformers_names(seen: dict[str, torch.Tensor], layout: Topology) -> dict[str, torch.Tensor]:
    """Gradients of AutoEP's layers under Transformers' names and in its shapes, experts of all ranks together."""
    named: dict[str, torch.Tensor] = {}
    for name, value in seen.items():
        renamed = name
        for pattern, replacement in _RENAMED:
            renamed = re.sub(pattern, replacement, renamed)
        if match := re.search(r"experts\.(w[123])$", name):
            shards: list[Any] = [None] * layout.world_size
            distributed.all_gather_object(shards, value)
            peers = layout.expert_parallel_ranks(distributed.get_rank())
            renamed, value = f"{name[: -len(match[1])]}{match[1]}", torch.cat([shards[peer] for peer in peers])
        named[renamed] = value
    for name in [name for name in named if name.endswith("experts.w1")]:
        stem = name[: -len("w1")]
        named[f"{stem}gate_up_proj"] = torch.cat([named.pop(name), named.pop(f"{stem}w3")], dim=1)
        named[f"{stem}down_proj"] = named.pop(f"{stem}w2")
    return named


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
        Name of each tensor → the norm of the difference relative to the norm of Transformers'; infinite where ours has
        no such tensor.
    """
    world, rank = distributed.get_world_size(), distributed.get_rank()
    layout = Topology(world, options.get("expert_parallel_size") or 1, options.get("tensor_parallel_size") or 1)
    lane = layout.data_parallel_rank(rank)
    module = Observed(build(config, seed), batch_of(lane), **arguments)
    fit(module, Sentences(64), Zero3FastStrategy(**options), steps=1)
    ours = as_transformers_names(module.seen, layout)
    theirs = plain(config, layout.data_parallel_size, **arguments)[lane]
    if "shared_expert." not in " ".join(theirs):
        ours = {name.replace(".mlp.shared_expert.", ".mlp.shared_experts."): value for name, value in ours.items()}
    assert not [name for name in ours if name not in theirs and ours[name].any()]
    ours = {
        name: whole(name, ours[name], value.shape, layout) if name.startswith("d ") else ours[name]
        for name, value in theirs.items()
        if name in ours
    }
    return {
        name: float((ours[name] - value).norm() / value.norm()) if name in ours else math.inf
        for name, value in theirs.items()
    }
