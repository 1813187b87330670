# SPDX-License-Identifier: Apache-2.0
"""Many ranks' values into one, by one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torchmetrics import Metric

How = Literal["maximum", "sum", "mean"]


class Combined(NamedTuple):
    """One entry of all ranks.

    Args:
        value: Combined as was asked.
        smallest: The smallest of all ranks.
        largest_at: The first rank that has the largest.
    """

    value: float
    smallest: float
    largest_at: int


class PackedOverRanks(Metric):
    """A torchmetrics metric whose state is one vector: each entry is combined over ranks in its own way.

    All entries travel in one gather, however many there are; a metric object per entry would need a collective each.

    Args:
        how: For each entry, ``"maximum"``, ``"sum"`` or ``"mean"`` over ranks.

    >>> metric = PackedOverRanks(["maximum", "sum"])
    >>> metric.update([3.0, torch.tensor(4.0)])
    >>> metric.compute()[0].tolist()
    [3.0, 4.0]
    """

    full_state_update = False
    values: torch.Tensor
    by_rank: torch.Tensor
    """After :meth:`compute`: what each rank gave, a row per rank."""

    def __init__(self, how: Sequence[How]) -> None:
        super().__init__(dist_sync_fn=gather_once)
        self._sums = torch.tensor([entry == "sum" for entry in how])
        self._means = torch.tensor([entry == "mean" for entry in how])
        # float64: byte and token counts are exact in it.
        self.add_state("values", torch.zeros(len(how), dtype=torch.float64), dist_reduce_fx=self._combine)

    def update(self, values: Sequence[float | torch.Tensor]) -> None:
        """Take this rank's values, in the order of ``how``.

        Args:
            values: Numbers, or tensors on any device, which stay there until :meth:`compute`; one with several
                elements counts as so many entries.
        """
        self.values = packed(values, self.device)

    def compute(self) -> torch.Tensor:
        """What ranks gave, combined; torchmetrics has synchronised the state before.

        Returns:
            Three rows: combined as was asked, the smallest, and the first rank that has the largest. A tensor, since
            torchmetrics would look at every number of a list, which took longer than all the rest.
        """
        if self.values.ndim > 1:
            return self.values
        self.by_rank = self.values[None]
        return torch.stack([self.values, self.values, torch.zeros_like(self.values)])  # a single process

    def _combine(self, by_rank: torch.Tensor) -> torch.Tensor:
        self.by_rank = by_rank
        sums, means = self._sums.to(by_rank.device), self._means.to(by_rank.device)
        combined = torch.where(sums, by_rank.sum(0), torch.where(means, by_rank.mean(0), by_rank.amax(0)))
        # argmax alone may answer with any of several.
        largest_at = (by_rank == by_rank.amax(0)).to(torch.float64).argmax(0)
        return torch.stack([combined, by_rank.amin(0), largest_at.to(by_rank.dtype)])


def combined_over_ranks(metric: PackedOverRanks) -> list[Combined]:
    """Combine by the one collective, and wait for the result.

    Args:
        metric: With this rank's values.
    """
    return [Combined(value, smallest, int(rank)) for value, smallest, rank in metric.compute().T.tolist()]


def packed(values: Sequence[float | torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """One float64 vector of numbers and tensors, without waiting for any of them.

    Args:
        values: Numbers and tensors, in order.
        device: Where the vector is made.

    >>> packed([1.0, torch.tensor([2, 3]), 4], "cpu").tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    parts: list[torch.Tensor] = []
    numbers: list[float] = []

    def put_numbers() -> None:
        if numbers:
            parts.append(torch.tensor(numbers, dtype=torch.float64, device=device))
            numbers.clear()

    for value in values:
        if isinstance(value, torch.Tensor):
            put_numbers()
            parts.append(value.detach().reshape(-1).to(device=device, dtype=torch.float64))
        else:
            numbers.append(float(value))
    put_numbers()
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)


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
