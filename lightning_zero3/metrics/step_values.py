# SPDX-License-Identifier: Apache-2.0
"""One step's values: gathered on each rank, combined by one collective, and named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_zero3.metrics import names
from lightning_zero3.metrics.over_ranks import Combined, How, PackedOverRanks, combined_over_ranks
from lightning_zero3.metrics.router_load import router_load
from lightning_zero3.metrics.throughput import rates

Value = float | torch.Tensor


@dataclass
class StepValues:
    """What one rank has of a step. Every rank must have the same names, or their vectors don't fit together.

    Args:
        metrics: Metric name → value.
        tokens: Tokens of the step; NaN where they aren't known, 0 where another rank counts them.
        flops: FLOPs that the step needed, likewise.
        peak_flops: FLOP/s of this rank's device; NaN where it isn't known.
        expert_counts: Tokens of each expert, of all layers one after the other; None without experts.
        experts: Layer → number of its experts, in the counts' order.
    """

    metrics: dict[str, Value] = field(default_factory=dict)
    tokens: float = 0.0
    flops: float = 0.0
    peak_flops: float = 0.0
    expert_counts: torch.Tensor | None = None
    experts: Mapping[str, int] = field(default_factory=dict)
    _packed: PackedOverRanks | None = None

    def over_ranks(self, device: torch.device | str, world_size: int) -> dict[str, float]:
        """All metrics of the step, over all ranks, by one collective and one wait for the device.

        Args:
            device: The training device, where the collective runs.
            world_size: Number of ranks.

        Returns:
            Metric name → value.

        Raises:
            KeyError: A metric isn't in the table.
        """
        how: list[How] = [_how(names.BY_NAME[name]) for name in self.metrics]
        values: list[Value] = [*self.metrics.values(), self.tokens, self.flops, self.peak_flops]
        how += ["sum"] * 3
        if self.expert_counts is not None:
            values.append(self.expert_counts)
            how += ["sum"] * self.expert_counts.numel()
        packed = PackedOverRanks(how).to(device)
        packed.update(values)
        self._packed = packed
        combined = combined_over_ranks(packed)
        known, (tokens, flops, peak), counts = (
            combined[: len(self.metrics)],
            combined[len(self.metrics) : len(self.metrics) + 3],
            combined[len(self.metrics) + 3 :],
        )
        named = dict(zip(self.metrics, known, strict=True))
        step_ms = named[names.STEP_TOTAL].value
        return {
            **{name: entry.value for name, entry in named.items()},
            **rates(tokens.value, flops.value, peak.value, step_ms=step_ms, world_size=world_size),
            **router_load(self._by_layer(counts)),
            **(_spread(named) if world_size > 1 else {}),
        }

    def of_each_rank(self) -> dict[str, list[float]]:
        """Each rank's values, in rank order, of the metrics whose spread is told.

        After :meth:`over_ranks`, from what its collective brought.
        """
        assert self._packed is not None
        columns = self._packed.by_rank[:, : len(self.metrics)].T.tolist()
        return {name: column for name, column in zip(self.metrics, columns, strict=True) if names.BY_NAME[name].spread}

    def _by_layer(self, counts: list[Combined]) -> dict[str, list[float]]:
        numbers = iter(entry.value for entry in counts)
        return {layer: [next(numbers) for _ in range(experts)] for layer, experts in self.experts.items()}


def _how(entry: names.MetricEntry) -> How:
    assert entry.over_ranks in ("maximum", "sum", "mean"), f"{entry.name} isn't packed as it is"
    return entry.over_ranks


def _spread(values: Mapping[str, Combined]) -> dict[str, float]:
    spread: dict[str, float] = {}
    for name, value in values.items():
        if names.BY_NAME[name].spread:
            smallest, where = names.spread_of(names.BY_NAME[name])
            spread[smallest.name] = value.smallest
            spread[where.name] = float(value.largest_at)
    return spread


def layer_names(paths: list[str]) -> list[str]:
    """Short names for layers: their number, where that tells them apart.

    Args:
        paths: Dotted names of modules.

    >>> layer_names(["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"])
    ['layer_1', 'layer_2']
    >>> layer_names(["encoder.0.gate", "decoder.0.gate"])
    ['encoder.0.gate', 'decoder.0.gate']
    """
    numbers = [next((part for part in path.split(".") if part.isdigit()), None) for path in paths]
    if None in numbers or len(set(numbers)) < len(numbers):
        return paths
    return [f"layer_{number}" for number in numbers]
