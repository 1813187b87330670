# SPDX-License-Identifier: Apache-2.0
"""From a path on the command line to a run's metrics, whichever logger wrote them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_zero3.compare import mlflow_runs, tensorboard_events
from lightning_zero3.config import SetupError
from lightning_zero3.metrics.summary import Metrics, number_steps, read_metrics

CSV_FILE = "metrics.csv"


@dataclass(frozen=True)
class Run:
    """One run's log.

    Args:
        path: As it was given.
        kind: Which logger wrote it: CSV, TensorBoard or MLflow.
        metrics: Name → {Lightning's step: value}.
        repeated: Steps that are in the log twice, as after a resume into the same log; the later values are taken.
    """

    path: str
    kind: str
    metrics: Metrics
    repeated: tuple[int, ...] = ()

    def numbered(self) -> Mapping[str, Mapping[int, float]]:
        """The metrics by step, the run's first logged optimizer step being 1."""
        return number_steps(self.metrics)


def read_run(given: str) -> Run:
    """Read a run.

    Args:
        given: A run's folder (with ``metrics.csv``, TensorBoard's event files or MLflow's ``meta.yaml``), one of these
            files, or a store of MLflow's and a run in it: ``mlruns#RUN``, ``mlflow.db#RUN``.

    Raises:
        SetupError: There is no run, or its log can't be read or is empty.
    """
    try:
        run = _read(given)
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(f"{given}: {error}") from error
    if not any(run.metrics.values()):
        raise SetupError(f"{given}: the log holds no metric. Did the run end before its first step was logged?")
    return run


def _read(given: str) -> Run:
    if mlflow_runs.is_store(given):
        return Run(given, "MLflow", *mlflow_runs.read(given))
    path = Path(given)
    if path.is_dir():
        return _in_folder(given, path)
    if tensorboard_events.is_file(path):
        return Run(given, "TensorBoard", tensorboard_events.read(path))
    if not path.exists():
        raise SetupError(f"{given}: there is no such file or folder. Give a run's folder, the one with {CSV_FILE}.")
    return _csv(given, path)


def _in_folder(given: str, path: Path) -> Run:
    if (path / CSV_FILE).is_file():
        return _csv(given, path / CSV_FILE)
    for folder in (path, path / "tensorboard"):  # the second is the recipes'
        if tensorboard_events.in_folder(folder):
            return Run(given, "TensorBoard", tensorboard_events.read(folder))
    below = sorted(str(each.parent) for name in (CSV_FILE, "events.out.*") for each in path.glob(f"*/{name}"))
    if below:
        raise SetupError(f"{given} isn't a run, but holds some; give one of them: {', '.join(dict.fromkeys(below))}.")
    raise SetupError(f"{given}: no {CSV_FILE}, no event file of TensorBoard's and no run of MLflow's in there.")


def _csv(given: str, path: Path) -> Run:
    metrics = read_metrics(path)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row.get("step")]
    highest, repeated = -1.0, set()
    for text in steps:
        try:
            step = float(text)
        except ValueError:  # the last line, cut; `read_metrics` has refused any other
            break
        if step < highest:
            repeated.add(int(step))
        highest = max(highest, step)
    known = {step for values in metrics.values() for step in values}
    return Run(given, "CSV", metrics, tuple(sorted(repeated & known)))
