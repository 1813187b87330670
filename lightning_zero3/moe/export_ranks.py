# SPDX-License-Identifier: Apache-2.0
"""All ranks during an export: they agree before it, tell rank 0 what they hold, and end together where rank 0 fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from lightning_zero3.agreement import exchanged
from lightning_zero3.config import SetupError
from lightning_zero3.moe.export_folder import NotExportedError


class Ranks:
    """All ranks, who tell each other over gloo: masters may be on the host, and no device memory is needed."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self._size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        self._error: Exception | None = None

    def agreed(self, look: Callable[[], Any]) -> Any:
        """What it returns, or on all ranks an error, where one has one."""
        result: list[Any] = []

        def keep() -> None:
            result.append(look())

        if self._group is None:
            keep()
        else:
            for rank, (_, told) in enumerate(exchanged(keep, self._group)):
                if told is not None:
                    raise SetupError(f"Rank {rank} can't export, so no rank does. It says: {told[1]}")
        return result[0]

    def gathered(self, mine: Any) -> list[Any]:
        """Everybody's, on rank 0; elsewhere nothing."""
        if self._group is None:
            return [mine]
        everywhere: list[Any] | None = [None] * self._size if self.rank == 0 else None
        dist.gather_object(mine, everywhere, dst=0, group=self._group)
        return everywhere or []

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, or its error."""
        with self.noted():
            made = [make() if self.rank == 0 else None]
        self.go_on()
        if self._group is not None:
            dist.broadcast_object_list(made, src=0, group=self._group)
        return made[0]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep an error of rank 0's for :meth:`go_on`: the others are about to send."""
        try:
            yield
        except Exception as error:
            self._error = error

    def go_on(self) -> None:
        """Raise on all ranks what has failed on rank 0."""
        said = [None if self._error is None else f"{type(self._error).__name__}: {self._error}"]
        if self._group is not None:
            failed = torch.tensor([float(self._error is not None)])
            dist.broadcast(failed, src=0, group=self._group)
            if failed.item():
                dist.broadcast_object_list(said, src=0, group=self._group)
        if self._error is not None and (isinstance(self._error, SetupError) or self._size == 1):
            raise self._error
        if said[0] is not None:
            raise NotExportedError(f"Nothing was exported. On rank 0: {said[0]}") from self._error

    def sent_to_first(
        self, values: torch.Tensor | None, rank: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A rank's values, on rank 0."""
        if rank == 0 or self._group is None:
            return values
        if self.rank == rank:
            assert values is not None
            dist.send(values, dst=0, group=self._group)
        if self.rank != 0:
            return None
        received = torch.empty(numel, dtype=dtype)
        dist.recv(received, src=rank, group=self._group)
        return received


@contextmanager
def ranks_together() -> Iterator[Ranks]:
    """All ranks for the length of an export, with a group of their own if there are several."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield Ranks(None)
        return
    group = dist.new_group(backend="gloo")
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group(group)
