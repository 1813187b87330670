# SPDX-License-Identifier: Apache-2.0
"""What the optimizer counts about itself on request: gradient clears and collectives, as metrics."""

from __future__ import annotations

from typing import Any

from lightning_zero3.metrics import names


def start_censuses(engine: Any, *, grad_clear: bool, collectives: bool) -> None:
    """Have the engine's optimizer count, if it is ours.

    Args:
        engine: A DeepSpeed engine, or any other module.
        grad_clear: Whether to count gradient clears.
        collectives: Whether to count the step's collectives.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    if grad_clear and hasattr(optimizer, "start_grad_clear_census"):
        optimizer.start_grad_clear_census()
    if collectives and hasattr(optimizer, "start_collective_census"):
        optimizer.start_collective_census()


def read_censuses(engine: Any) -> dict[str, float]:
    """The last step's counts.

    Args:
        engine: A DeepSpeed engine, or any other module.

    Returns:
        Metric name → parameters, µs or collectives; empty where nothing was counted.
    """
    optimizer = getattr(engine, "optimizer", None)
    values: dict[str, float] = {}
    clears = getattr(optimizer, "grad_clear_census", None)
    if clears is not None:
        values[names.GRAD_CLEAR_VISITS] = float(clears.visits)
        values[names.GRAD_CLEAR_LIVE] = float(clears.live)
        values[names.GRAD_CLEAR_US_PER_VISIT] = 1e6 * clears.seconds / clears.visits if clears.visits else 0.0
    collectives = getattr(optimizer, "step_collectives", None)
    if collectives is not None:
        values[names.COLLECTIVES_PER_STEP] = float(collectives)
    return values
