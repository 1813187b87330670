"""The census of gradient clears, as metrics."""

from __future__ import annotations

from typing import Any

from lightning_zero3.metrics import names


def start_census(engine: Any) -> None:
    """Have the engine's optimizer count its clears, if it is ours.

    Args:
        engine: A DeepSpeed engine, or any other module.
    """
    start = getattr(getattr(engine, "optimizer", None), "start_grad_clear_census", None)
    if start is not None:
        start()


def read_census(engine: Any) -> dict[str, float]:
    """The last step's counts.

    Args:
        engine: A DeepSpeed engine, or any other module.

    Returns:
        Metric name → parameters, or µs; empty where nothing was counted.
    """
    census = getattr(getattr(engine, "optimizer", None), "grad_clear_census", None)
    if census is None:
        return {}
    per_visit = 1e6 * census.seconds / census.visits if census.visits else 0.0
    return {
        names.GRAD_CLEAR_VISITS: float(census.visits),
        names.GRAD_CLEAR_LIVE: float(census.live),
        names.GRAD_CLEAR_US_PER_VISIT: per_visit,
    }
