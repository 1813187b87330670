# SPDX-License-Identifier: Apache-2.0
"""The command: paths to runs, runs to a report, a report to a table, a page, JSON or a chart."""

from __future__ import annotations

import json as json_format
from pathlib import Path

from lightning_zero3.charts import require_drawable
from lightning_zero3.compare.read import read_run
from lightning_zero3.compare.report import assemble
from lightning_zero3.compare.tables import markdown as as_markdown
from lightning_zero3.compare.tables import require_matches, show
from lightning_zero3.config import SetupError


def compare(
    a: list[str] | None = None,
    b: list[str] | None = None,
    warmup: int = 1,
    metrics: list[str] | None = None,
    loss: str | None = None,
    markdown: bool = False,
    json: bool = False,
    chart: str | None = None,
) -> int:
    """Compare two settings of a training by the logs of their runs: ``lightning-zero3 compare RUN_A RUN_B``.

    A is what is held against; "saved" is what B takes less. A run is its folder (CSV, TensorBoard, MLflow), a
    metrics.csv, an event file, or a run of a store of MLflow's: mlruns#RUN, mlflow.db#RUN.

    Args:
        a: Runs of A, one or more; their differences are the noise that a saving has to be larger than.
        b: Runs of B, one or more.
        warmup: Steps at the beginning of each run that are left out; at least the first, which allocates the
            optimizer's state.
        metrics: Names, or patterns such as 'memory/*', of what is shown; by default what a step costs.
        loss: Name of the loss; by default train/loss, or optim/loss.
        markdown: Print a page of Markdown instead of a table.
        json: Print one JSON object instead of a table.
        chart: A PNG file to draw the comparison in.

    Returns:
        0.

    Raises:
        SetupError: A log can't be read, or there is nothing to compare; the message says why.
    """
    if not a or not b:
        raise SetupError("Two settings are compared: compare RUN_A RUN_B, or compare --a RUN ... --b RUN ...")
    if warmup < 1:
        raise SetupError(f"--warmup {warmup}: 1 or more; the first step allocates the optimizer's state.")
    if markdown and json:
        raise SetupError("--markdown and --json: one of them.")
    if chart is not None:
        require_drawable(Path(chart))
    runs_a, runs_b = ([read_run(path) for path in side] for side in (a, b))
    report = assemble(runs_a, runs_b, warmup=warmup, loss=loss)
    patterns = metrics or []
    if patterns and not json:
        require_matches(report, patterns)
    if chart is not None:
        from lightning_zero3.compare.charts import draw  # matplotlib is no dependency of training

        draw(report, runs_a, runs_b, Path(chart))
    if json:
        print(json_format.dumps(report, allow_nan=False))
    elif markdown:
        print(as_markdown(report, patterns))
    else:
        show(report, patterns)
    return 0
