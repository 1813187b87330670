"""The census of collectives: how many the optimizer step launches, counted where DeepSpeed launches them.

Upstream symbol: ``deepspeed.comm.comm.cdb``, the backend object that every function of ``deepspeed.comm`` calls
(0.19.7, 0.19.8). It is replaced for the length of ``step`` only, and only when somebody asked. Expires when DeepSpeed
counts.
"""

from __future__ import annotations

from typing import Any

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


class CountCollectives:
    """Mixin over a Stage-3 optimizer, above its other parts: counts the collectives of ``step``.

    Without :meth:`start_collective_census` the cost is one attribute look-up per step.
    """

    # Collectives of the last step, or None while nobody counts.
    step_collectives: int | None = None
    _collectives_wanted = False

    def start_collective_census(self) -> None:
        """Count from the next step on."""
        self._collectives_wanted = True

    def step(self, closure: Any = None) -> Any:
        """As upstream's."""
        if not self._collectives_wanted:
            return super().step(closure)  # type: ignore[misc]
        from deepspeed.comm import comm

        backend = comm.cdb
        counting = CountingBackend(backend)
        comm.cdb = counting
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            comm.cdb = backend
            self.step_collectives = counting.count
