# SPDX-License-Identifier: Apache-2.0
"""The census of collectives: how many the optimizer step launches, and only when somebody asked."""

from __future__ import annotations

from typing import Any

from lightning_zero3.collective_counts import counted_collectives
from lightning_zero3.optimizer.part import OptimizerPart


class CountCollectives(OptimizerPart):
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
            return super().step(closure)
        with counted_collectives() as counting:
            try:
                return super().step(closure)
            finally:
                self.step_collectives = counting.count
