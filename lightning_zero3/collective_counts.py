# SPDX-License-Identifier: Apache-2.0
"""Collectives, counted where DeepSpeed launches them.

Upstream symbol: ``deepspeed.comm.comm.cdb``, the backend object that every function of ``deepspeed.comm`` calls
(0.19.7, 0.19.8). It is replaced only for as long as somebody counts. Expires when DeepSpeed counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zero3.substitution import substituted

# Methods of the backend that communicate; each call is one launch, a coalesced one too.
COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "inference_all_reduce",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    }
)


class CountingBackend:
    """Passes everything on to a backend, and counts its collectives.

    Args:
        backend: DeepSpeed's backend object.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name in COLLECTIVES:
            self.count += 1
        return found


@contextmanager
def counted_collectives() -> Iterator[CountingBackend]:
    """Count inside the block; blocks may lie in each other, and then each counts.

    Yields:
        The backend in use, whose ``count`` grows.
    """
    from deepspeed.comm import comm

    counting = CountingBackend(comm.cdb)
    with substituted(comm, "cdb", counting):
        yield counting
