# SPDX-License-Identifier: Apache-2.0
"""What a finished run did, read from the ``metrics.csv`` of Lightning's ``CSVLogger``.

Pure arithmetic: nothing here needs a device, a plotting library or a trainer, so a run can be summed up anywhere.

Note [Step numbers]
    Lightning's ``step`` column starts at 0, and at any number in a resumed run. Everything here counts from 1: the
    first logged optimizer step is step 1, and the others keep their distance to it. A run logged every 50 steps has
    the numbers 1, 51, 101; it has no "steps 2 to 10", and says so instead of averaging steps 51 to 451 under that name.

    The first step is left out of every mean: it allocates the optimizer state, so its time isn't the time of a step.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lightning_zero3.metrics.names import (
    LOSS,
    MEMORY_PREFIX,
    STEP_MICROSTEP,
    STEP_TOTAL,
    TOKENS_PER_SECOND,
)

STEP_PREFIX = "step/"
GIB_SUFFIX = "_gib"
EARLY_STEPS = range(2, 11)  # steps 2 to 10, both included
LAST_LOSSES = 10

Metrics = Mapping[str, Mapping[int, float]]
"""Name of a metric → {Lightning's step: value}, as :func:`read_metrics` returns it."""

_NOT_METRICS = frozenset({"step", "epoch"})


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of ``count`` values, in the unit of those values."""

    mean: float
    minimum: float
    maximum: float
    count: int


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers. ``None`` (or an absent key) means that the run didn't log it. See Note [Step numbers].

    Attributes:
        steps: How many different optimizer steps were logged.
        step_microstep_early: The optimizer's part of a step, in ms, over steps 2 to 10.
        step_microstep: The same over all steps but the first.
        step_total_early: The whole step, in ms, over steps 2 to 10.
        step_total: The same over all steps but the first.
        tokens_per_second: Over all steps but the first.
        memory: The largest value that each ``memory/..._gib`` metric had, in GiB, the first step included: its peak
            is real.
        loss_first: The first logged loss.
        loss_last: The last logged loss.
        loss_last_mean: Mean of the last 10 logged losses (of all when there are fewer).
    """

    steps: int
    step_microstep_early: Spread | None
    step_microstep: Spread | None
    step_total_early: Spread | None
    step_total: Spread | None
    tokens_per_second: Spread | None
    memory: Mapping[str, float]
    loss_first: float | None
    loss_last: float | None
    loss_last_mean: float | None


def read_metrics(path: str | Path) -> dict[str, dict[int, float]]:
    """Read a ``metrics.csv`` of Lightning's ``CSVLogger``.

    Rows of one step are merged; where two of them hold the same metric, the later row counts. Empty cells and the
    columns ``step`` and ``epoch`` are left out. A last line that a killed run wrote in part is skipped: one without
    its line end (its last number may have lost digits), with too few cells, or with a cell that isn't a number.

    Args:
        path: The file, usually ``Path(trainer.logger.log_dir) / "metrics.csv"``.

    Returns:
        Name of the metric → {Lightning's step: value}, steps ascending, in the unit that the name ends with.

    Raises:
        FileNotFoundError: ``path`` isn't a file.
        ValueError: The file has no ``step`` column, or a line other than the last is malformed.
    """
    path = Path(path)
    lines = list(csv.reader(io.StringIO(_complete_lines(path))))
    header = lines[0] if lines else []
    if "step" not in header:
        raise ValueError(
            f"{path} has no 'step' column: its first complete line is {header}. Pass the metrics.csv that Lightning's "
            "CSVLogger wrote (an empty one: the run ended before the first flush; lower flush_logs_every_n_steps)."
        )
    metrics: dict[str, dict[int, float]] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if not cells:  # a blank line
            continue
        try:
            step, values = _read_row(header, cells)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}. Remove that line, or log numbers only.") from error
        for name, value in values.items():
            metrics.setdefault(name, {})[step] = value
    return {name: dict(sorted(values.items())) for name, values in metrics.items()}


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, smallest and largest of ``values``; ``None`` when there are none. One NaN makes all three NaN.

    >>> spread([3.0, 1.0, 2.0])
    Spread(mean=2.0, minimum=1.0, maximum=3.0, count=3)
    >>> spread([]) is None
    True
    """
    if not values:
        return None
    if any(math.isnan(value) for value in values):  # min() and max() would hide it or not, by its position
        return Spread(math.nan, math.nan, math.nan, len(values))
    return Spread(fmean(values), min(values), max(values), len(values))


def number_steps(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Renumber every metric so that the first logged optimizer step is step 1. See Note [Step numbers].

    Only the loss and the ``step/`` metrics tell when the first step was: memory and validation are also logged
    outside of steps, and get a number below 1 when that was before the first.

    >>> number_steps({"train/loss": {4: 3.5, 5: 3.25}, "memory/host_rss_gib": {3: 1.0, 5: 2.0}})
    {'train/loss': {1: 3.5, 2: 3.25}, 'memory/host_rss_gib': {0: 1.0, 2: 2.0}}
    """
    logged = _optimizer_steps(metrics) or {step for values in metrics.values() for step in values}
    offset = 1 - min(logged, default=1)
    return {name: {step + offset: value for step, value in values.items()} for name, values in metrics.items()}


def summarise(metrics: Metrics) -> RunSummary:
    """Sum up a run.

    Args:
        metrics: As :func:`read_metrics` returns it.

    >>> run = summarise({"train/loss": {0: 4.0, 1: 3.0}, "step/step_microstep_ms": {0: 900.0, 1: 20.0, 2: 30.0}})
    >>> run.steps, run.step_microstep_early, run.loss_last_mean
    (3, Spread(mean=25.0, minimum=20.0, maximum=30.0, count=2), 3.5)
    """
    numbered = number_steps(metrics)
    losses = [value for _, value in sorted(numbered.get(LOSS, {}).items())]
    last_losses = spread(losses[-LAST_LOSSES:])
    return RunSummary(
        steps=len(_optimizer_steps(numbered)),
        step_microstep_early=early(numbered, STEP_MICROSTEP),
        step_microstep=_after_first(numbered, STEP_MICROSTEP),
        step_total_early=early(numbered, STEP_TOTAL),
        step_total=_after_first(numbered, STEP_TOTAL),
        tokens_per_second=_after_first(numbered, TOKENS_PER_SECOND),
        memory=_largest_memory(numbered),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        loss_last_mean=last_losses.mean if last_losses else None,
    )


def early(numbered: Metrics, name: str) -> Spread | None:
    """A metric over steps 2 to 10.

    Args:
        numbered: As :func:`number_steps` returns it.
        name: The metric's.
    """
    return spread([value for step, value in numbered.get(name, {}).items() if step in EARLY_STEPS])


def _after_first(numbered: Metrics, name: str) -> Spread | None:
    return spread([value for step, value in numbered.get(name, {}).items() if step > 1])


def _largest_memory(numbered: Metrics) -> dict[str, float]:
    """Largest value of each memory metric in GiB; others under ``memory/`` (counts of retries) aren't sizes."""
    largest: dict[str, float] = {}
    for name, values in numbered.items():
        over_run = spread(list(values.values()))
        if name.startswith(MEMORY_PREFIX) and name.endswith(GIB_SUFFIX) and over_run is not None:
            largest[name] = over_run.maximum
    return largest


def _optimizer_steps(metrics: Metrics) -> set[int]:
    """Every step at which the loss or a ``step/`` metric was logged."""
    return {step for name, values in metrics.items() if name == LOSS or name.startswith(STEP_PREFIX) for step in values}


def _complete_lines(path: Path) -> str:
    """The text of ``path`` up to its last line end, with newlines for line ends."""
    if not path.is_file():
        folder = path.parent
        seen = sorted(entry.name for entry in folder.iterdir())[:10] if folder.is_dir() else None
        where = (
            "it is a folder" if path.is_dir() else f"{folder} " + (f"holds {seen}" if seen else "is empty or absent")
        )
        raise FileNotFoundError(
            f"No metrics file at {path}: {where}. Pass the metrics.csv in trainer.logger.log_dir, and give the Trainer "
            "logger=CSVLogger(...)."
        )
    text = path.read_text(encoding="utf-8", errors="replace")  # the cut of a killed run may fall inside a character
    return text[: text.rfind("\n") + 1]


def _read_row(header: Sequence[str], cells: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Step and values of one line.

    Raises:
        ValueError: The number of cells isn't the header's, or a cell isn't a number, or the step isn't a whole one.
    """
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells under a header of {len(header)}")
    row = dict(zip(header, cells, strict=True))
    step = _to_number("step", row["step"])
    if not step.is_integer():
        raise ValueError(f"the step is {row['step']!r}, not a whole number")
    values = {name: _to_number(name, cell) for name, cell in row.items() if cell.strip() and name not in _NOT_METRICS}
    return int(step), values


def _to_number(name: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{name!r} is {cell!r}, not a number") from None
