"""The census of the optimizer step's collectives, as a metric."""

from __future__ import annotations

from typing import Any

from lightning_zero3.metrics import names


def start_census(engine: Any) -> None:
    """Have the engine's optimizer count the collectives of its steps, if it is ours.

    Args:
        engine: A DeepSpeed engine, or any other module.
    """
    start = getattr(getattr(engine, "optimizer", None), "start_collective_census", None)
    if start is not None:
        start()


def read_census(engine: Any) -> dict[str, float]:
    """The last step's count.

    Args:
        engine: A DeepSpeed engine, or any other module.

    Returns:
        Metric name → collectives; empty where nothing was counted.
    """
    count = getattr(getattr(engine, "optimizer", None), "step_collectives", None)
    return {} if count is None else {names.COLLECTIVES_PER_STEP: float(count)}
