# SPDX-License-Identifier: Apache-2.0
"""Logs of runs as ``CSVLogger`` writes them: those of the reports, from their means and ranges, and others."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from lightning_zero3.metrics import names

# Optimizer step in ms: mean, smallest, largest of steps 2 to 10, as reported; A: the clear per sub-group, B: one clear.
GLM = {"a": (399.78, 384.76, 439.35), "b": (202.44, 191.47, 210.40)}
QWEN = {"a": (188.88, 187.58, 190.87), "b": (186.15, 184.55, 189.92)}
WHOLE_STEP = {"glm": {"a": 5000.0, "b": 4810.0}, "qwen": {"a": 4165.1, "b": 4182.1}}
VISITS = {"glm": {"a": 100_695, "b": 735}, "qwen": {"a": 19_639, "b": 479}}


def nine(mean: float, low: float, high: float, spread: float = 0.0) -> list[float]:
    """Nine values of that mean, smallest and largest; ``spread`` widens those between."""
    between = (9 * mean - low - high) / 7
    return [low, high, *(between + spread * (place - 3) / 3 for place in range(7))]


def write_csv(folder: Path, metrics: Mapping[str, Mapping[int, float]]) -> str:
    """A ``metrics.csv`` in that folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *metrics])
        writer.writeheader()
        for step in sorted({step for values in metrics.values() for step in values}):
            writer.writerow({"step": step, **{name: values.get(step, "") for name, values in metrics.items()}})
    return str(folder)


def reported(folder: Path, model: str, side: str, *, losses: list[float] | None = None) -> str:
    """A run of a report: ten steps, the first of which is slow."""
    figures = (GLM if model == "glm" else QWEN)[side]
    # As wide as the reported t asks for.
    steps = [5000.0, *nine(*figures, spread=0.0 if model == "glm" else 1.08)]
    return write_csv(
        folder,
        {
            names.STEP_MICROSTEP: dict(enumerate(steps)),
            names.STEP_TOTAL: dict.fromkeys(range(10), WHOLE_STEP[model][side]),
            names.GRAD_CLEAR_VISITS: dict.fromkeys(range(10), float(VISITS[model][side])),
            names.LOSS: dict(enumerate(losses or [12.748915] * 10)),
            names.GRAD_NORM: dict.fromkeys(range(10), 0.7232),
        },
    )


def learning(steps: int, *, optimizer_ms: float = 20.0, noise: float = 0.0) -> dict[str, dict[int, float]]:
    """Metrics of a run that learns."""
    return {
        names.LOSS: {step: 3 / (1 + step) + noise * math.sin(step) for step in range(steps)},
        names.STEP_MICROSTEP: {step: optimizer_ms + step % 3 for step in range(steps)},
        names.STEP_TOTAL: {step: 300.0 + step % 5 for step in range(steps)},
    }
