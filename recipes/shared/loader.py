# SPDX-License-Identifier: Apache-2.0
"""The recipes' loader: it can be saved and restored at any batch."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ResumableLoader(DataLoader[Any]):
    """A loader whose position is in Lightning's checkpoints; Lightning begins any other anew after a resume.

    The order of an epoch is its sampler's, made of a seed and the epoch's number; so a position is a number of batches.
    Those before it are read and dropped, which costs a copy of their tokens each.
    """

    _first = _given = 0

    def __iter__(self) -> Any:
        self._given, self._first = self._first, 0
        # Lightning may ask for the state between two batches at any time, so the count goes up before each is given.
        for batch in islice(super().__iter__(), self._given, None):
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position: batches of this epoch that were given."""
        return {"batches": self._given % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next epoch at a position.

        Args:
            state: From :meth:`state_dict`.
        """
        self._first = self._given = state["batches"]


def make_loader(samples: Dataset[Any], *, batch_size: int, ranks: int, seed: int, pin_memory: bool) -> ResumableLoader:
    """Batches in an order that depends on seed and epoch only.

    Args:
        samples: All samples; Lightning gives each rank its share.
        batch_size: Samples of one batch.
        ranks: The number of ranks. A single one would draw its order from torch's state, which a resume doesn't have.
        seed: For that one's order; several ranks have that of ``seed_everything``.
        pin_memory: Whether batches are page-locked.
    """
    # A sampler with `set_epoch`, which Lightning calls; with several ranks it puts in such a one by itself.
    alone: DistributedSampler[Any] | None = None
    if ranks == 1:
        alone = DistributedSampler(samples, num_replicas=1, rank=0, seed=seed)
    return ResumableLoader(
        samples, batch_size=batch_size, sampler=alone, shuffle=alone is None, drop_last=True, pin_memory=pin_memory
    )
