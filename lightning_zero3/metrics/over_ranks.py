"""Many ranks' values into one, by one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchmetrics import Metric

from lightning_zero3.metrics.names import OverRanks


class PackedOverRanks(Metric):
    """A torchmetrics metric whose state is one vector: each entry is combined over ranks in its own way.

    All entries travel in one gather, however many there are; a metric object per entry would need a collective each.

    Args:
        how: For each entry, ``"maximum"`` or ``"sum"`` over ranks.

    >>> metric = PackedOverRanks(["maximum", "sum"])
    >>> metric.update([3.0, 4.0])
    >>> metric.compute()
    [3.0, 4.0]
    """

    full_state_update = False
    values: torch.Tensor

    def __init__(self, how: Sequence[OverRanks]) -> None:
        super().__init__(dist_sync_fn=gather_once)
        self._sums = torch.tensor([entry == "sum" for entry in how])
        # float64: byte and token counts are exact in it.
        self.add_state("values", torch.zeros(len(how), dtype=torch.float64), dist_reduce_fx=self._combine)

    def update(self, values: Sequence[float]) -> None:
        """Take this rank's values, in the order of ``how``."""
        self.values = torch.tensor(values, dtype=torch.float64, device=self.device)

    def compute(self) -> list[float]:
        """The combined values; torchmetrics has synchronised the state before."""
        combined: list[float] = self.values.tolist()
        return combined

    def _combine(self, by_rank: torch.Tensor) -> torch.Tensor:
        return torch.where(self._sums.to(by_rank.device), by_rank.sum(0), by_rank.amax(0))


def gather_once(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """All ranks' tensors by a single collective; torchmetrics' own gather asks for shapes first and needs three.

    Args:
        tensor: Of the same shape and dtype on every rank.
        group: A process group, or None for all ranks.

    Returns:
        One tensor per rank, in rank order.
    """
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, tensor, group=group)
    return gathered
