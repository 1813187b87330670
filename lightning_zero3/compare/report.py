# SPDX-License-Identifier: Apache-2.0
"""Two sides of runs to a report: a dict of plain values, the same for the table, the page, the chart and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from lightning_zero3.compare.read import Run
from lightning_zero3.compare.statistics import Agreement, Difference, agreement, between, difference, within
from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names

Side = Sequence[Run]
Values = Mapping[int, float]

# Whose saving is told first: the optimizer's part of a step, else the whole step.
_FIRST = (names.STEP_MICROSTEP, names.OPTIMIZER_STEP, names.STEP_TOTAL)
_LOSSES = (names.LOSS, names.LOSS_OF_STEP)
# What only says how a run learns; compared step by step, not by means.
_NOT_COSTS = frozenset({*_LOSSES, names.GRAD_NORM, names.LEARNING_RATE, names.DEVICE_TOKENS_PER_SECOND})
_NOT_COSTS_BELOW = (names.SPREAD_PREFIX, "moe/")
_MOST_NAMES = 8


def assemble(a: Side, b: Side, *, warmup: int = 1, loss: str | None = None) -> dict[str, Any]:
    """Compare two settings.

    Args:
        a: Runs of the one that is held against, one or more.
        b: Runs of the other.
        warmup: Steps at each run's beginning that are left out of means and ranges.
        loss: Name of the loss; by default the recipes' or ``Zero3Monitor``'s.

    Returns:
        ``metrics``: for each that both sides have, the fields of
        :class:`~lightning_zero3.compare.statistics.Difference`, in the unit that its name ends with. ``clear``: whether
        its means differ by more than chance explains. ``share_of_step``: of the times, what is saved over A's whole
        step. ``first_metric``: whose saving is told first. ``whole_step``: what the whole step changed by, and what of
        it the first metric doesn't explain (``drift``), in ms. ``loss`` and ``grad_norm``: whether step 1 is
        bit-identical, and the largest difference after it. ``noise_floor``: the same differences between runs of one
        side, and that of their means; None with one run per side. ``cost_per_avoided_visit``: where gradient clears
        were counted. ``only_in_a``, ``only_in_b``, ``notes``, ``runs``, ``warmup``, ``steps``.

    Raises:
        SetupError: There is no common metric, or no step is left.
    """
    numbered_a, numbered_b = ([run.numbered() for run in side] for side in (a, b))
    values_a, values_b = (_after(numbered, warmup) for numbered in (numbered_a, numbered_b))
    common = sorted(_names(a) & _names(b))
    if not common:
        raise SetupError(f"No metric is in both: A has {_some(_names(a))}; B has {_some(_names(b))}.")
    for label, side, values in (("A", a, values_a), ("B", b, values_b)):
        if not any(values.get(name) for name in common):
            steps = max(len(each) for run in side for each in run.metrics.values())
            raise SetupError(
                f"{label} has no step left: {', '.join(run.path for run in side)} logged {steps} "
                f"step{'s' * (steps != 1)}, and the first {warmup} of each run {'are' if warmup > 1 else 'is'} left "
                "out (--warmup). Give runs of more steps."
            )
    compared = {
        name: difference(values_a[name], values_b[name]) for name in common if values_a[name] and values_b[name]
    }
    if not compared:
        raise SetupError(f"No metric has values after step {warmup} in both; A and B both have {_some(set(common))}.")
    name_of_loss = _loss(set(common), loss)
    narrow = any(run.kind == "TensorBoard" for run in (*a, *b))
    losses, norms = ([_values(side, name, narrow) for side in (a, b)] for name in (name_of_loss, names.GRAD_NORM))
    of_loss, of_norm = (agreement(between(*sides)) for sides in (losses, norms))
    first = next((name for name in _FIRST if name in compared), None)
    return {
        "metrics": {name: asdict(found) for name, found in compared.items()},
        "clear": {name: found.is_clear for name, found in compared.items()},
        "share_of_step": _shares(compared),
        "first_metric": first,
        "whole_step": _whole_step(compared, first),
        "loss": _told(of_loss),
        "grad_norm": _told(of_norm),
        "noise_floor": _noise_floor((numbered_a, numbered_b), warmup, common, losses, norms),
        "cost_per_avoided_visit": _cost_per_visit(compared),
        "only_in_a": sorted(_names(a) - _names(b)),
        "only_in_b": sorted(_names(b) - _names(a)),
        "notes": _notes(a, b, of_loss, of_norm),
        "runs": {label: [{"path": run.path, "kind": run.kind} for run in side] for label, side in (("a", a), ("b", b))},
        "warmup": warmup,
        "steps": {"a": _steps(numbered_a), "b": _steps(numbered_b)},
        "loss_metric": name_of_loss,
    }


def by_step(side: Side, name: str | None, *, numbered: bool = True) -> list[Values]:
    """A metric's values, run by run.

    Args:
        side: Runs.
        name: The metric's.
        numbered: By the run's own step, from 1; else by Lightning's.
    """
    runs = [run.numbered() if numbered else run.metrics for run in side]
    return [] if name is None else [dict(run[name]) for run in runs if name in run]


def in_tables(name: str) -> bool:
    """Whether a metric is shown where not all are: costs, of all ranks together.

    Args:
        name: The metric's.

    >>> in_tables("step/total_ms"), in_tables("ranks/total_min_ms"), in_tables("moe/dead_experts")
    (True, False, False)
    """
    return name not in _NOT_COSTS and not name.startswith(_NOT_COSTS_BELOW)


def _after(numbered: Sequence[Mapping[str, Values]], warmup: int) -> dict[str, list[float]]:
    """All runs' values of the steps after the first ones, by metric."""
    values: dict[str, list[float]] = {}
    for run in numbered:
        for name, of_run in run.items():
            values.setdefault(name, []).extend(value for step, value in of_run.items() if step > warmup)
    return values


def _names(side: Side) -> set[str]:
    return {name for run in side for name, values in run.metrics.items() if values}


def _some(found: set[str]) -> str:
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return ", ".join(sorted(found)[:_MOST_NAMES]) + more


def _loss(common: set[str], asked_for: str | None) -> str | None:
    if asked_for is not None and asked_for not in common:
        raise SetupError(f"--loss {asked_for}: not in both. What is: {_some(common)}.")
    return asked_for or next((name for name in _LOSSES if name in common), None)


def _values(side: Side, name: str | None, narrow: bool) -> list[Values]:
    """By Lightning's step; in 32 bits, if one of the logs has no more."""
    values = by_step(side, name, numbered=False)
    if not narrow:
        return values
    with np.errstate(over="ignore"):
        return [{step: float(np.float32(value)) for step, value in run.items()} for run in values]


def _told(found: Agreement) -> dict[str, Any]:
    return {"step1_identical": found.step1_identical, "largest_difference": found.largest_difference}


def _shares(compared: Mapping[str, Difference]) -> dict[str, float]:
    """Of each time, what is saved over A's whole step."""
    whole = compared.get(names.STEP_TOTAL)
    if whole is None or not whole.mean_a:
        return {}
    times = {name: found.saved for name, found in compared.items() if name.startswith("step/") and name.endswith("_ms")}
    return {name: saved / whole.mean_a for name, saved in times.items() if saved is not None}


def _whole_step(compared: Mapping[str, Difference], first: str | None) -> dict[str, Any] | None:
    whole = compared.get(names.STEP_TOTAL)
    if whole is None:
        return None
    part = None if first in (None, names.STEP_TOTAL) else compared[str(first)].saved
    drift = None if part is None or whole.saved is None else whole.saved - part
    return {"mean_a": whole.mean_a, "mean_b": whole.mean_b, "saved": whole.saved, "drift": drift}


def _noise_floor(
    numbered: Sequence[Sequence[Mapping[str, Values]]],
    warmup: int,
    common: Sequence[str],
    losses: Sequence[Sequence[Values]],
    norms: Sequence[Sequence[Values]],
) -> dict[str, Any] | None:
    if all(len(side) < 2 for side in numbered):
        return None
    means: dict[str, float] = {}
    for side in numbered:
        runs = [_after([run], warmup) for run in side]
        for name in common:
            of_runs = [fmean(run[name]) for run in runs if run.get(name)]
            apart = [abs(left - right) for left, right in combinations(of_runs, 2)]
            if apart and max(apart) == max(apart):
                means[name] = max(means.get(name, 0.0), *apart)
    floors = (agreement([pair for side in sides for pair in within(side)]) for sides in (losses, norms))
    of_loss, of_norm = (_told(floor) for floor in floors)
    return {"loss": of_loss, "grad_norm": of_norm, "means": means}


def _cost_per_visit(compared: Mapping[str, Difference]) -> dict[str, float] | None:
    visits, time = compared.get(names.GRAD_CLEAR_VISITS), compared.get(names.STEP_MICROSTEP)
    if visits is None or time is None or not visits.saved or time.saved is None:
        return None
    return {"avoided_visits": visits.saved, "saved_ms": time.saved, "microseconds": 1e3 * time.saved / visits.saved}


def _steps(numbered: Sequence[Mapping[str, Values]]) -> list[int]:
    return [len({step for values in run.values() for step in values if step >= 1}) for run in numbered]


def _notes(a: Side, b: Side, of_loss: Agreement, of_norm: Agreement) -> list[str]:
    """What a reader has to know of these runs."""
    notes = []
    for run in (*a, *b):
        if run.repeated:
            first, last = run.repeated[0] + 1, run.repeated[-1] + 1
            span = f"steps {first} to {last} are" if last > first else f"step {first} is"
            notes.append(
                f"{run.path}: {span} in the log twice, as after a resume. The later values are taken; the resumed "
                "run's own first step isn't left out."
            )
    lengths = [set(_steps([run.numbered() for run in side])) for side in (a, b)]
    if lengths[0] != lengths[1]:
        told = [" or ".join(map(str, sorted(each))) for each in lengths]
        notes.append(f"A logged {told[0]} steps, B {told[1]}: means and ranges are of other numbers of steps.")
    for what, found in (("loss", of_loss), ("gradient norm", of_norm)):
        if found.without_number:
            first, more = found.without_number[0], len(found.without_number) - 1
            others = f" and {more} more" if more else ""
            notes.append(f"The {what} is NaN or infinite in step {first}{others}.")
    kinds = {run.kind for run in (*a, *b)}
    if len(kinds) > 1 and "TensorBoard" in kinds:
        notes.append("TensorBoard keeps 32 bits of a number; losses and gradient norms are compared in these.")
    return notes
