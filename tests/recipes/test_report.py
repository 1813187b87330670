# SPDX-License-Identifier: Apache-2.0
"""The table and the chart at the end of a recipe."""

import io
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from lightning_zero3.metrics.names import (
    BWD_MICROSTEP,
    FWD_MICROSTEP,
    LOSS,
    STEP_MICROSTEP,
    STEP_TOTAL,
    TOKENS_PER_SECOND,
)
from lightning_zero3.metrics.summary import RunSummary, read_metrics, summarise
from lightning_zero3.metrics.summary_table import print_table

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from shared.report import draw_chart

Metrics = dict[str, dict[int, float]]
Draw = Callable[..., list[Axes]]


def a_run(steps: int, *, optimizer_ms: float = 20.0) -> Metrics:
    later = range(1, steps)
    return {
        LOSS: {step: 3.0 / (1 + step) for step in range(steps)},
        STEP_MICROSTEP: {0: 5000.0, **{step: optimizer_ms + step % 3 for step in later}},
        FWD_MICROSTEP: {0: 400.0, **{step: 90.0 + step % 5 for step in later}},
        BWD_MICROSTEP: {0: 700.0, **{step: 180.0 + step % 7 for step in later}},
        STEP_TOTAL: dict.fromkeys(range(steps), 300.0),
        TOKENS_PER_SECOND: dict.fromkeys(range(steps), 12345.0),
        "memory/peak_allocated_gib": dict.fromkeys(range(steps), 51.9),
        "memory/host_rss_gib": dict.fromkeys(range(steps), 7.25),
        "memory/host_rss_peak_gib": dict.fromkeys(range(steps), 7.5),
    }


def table_of(summary: RunSummary, title: str = "a run", width: int = 80) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    print_table(summary, title=title, console=console)
    return console.export_text().splitlines()


def row(lines: list[str], label: str) -> list[str]:
    """The cells of the one row with that label."""
    found = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines if label in line]
    assert len(found) == 1, f"{label!r} in {len(found)} rows of {lines}"
    return found[0][1:]


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draw a chart, check that the PNG isn't blank, and return its panels."""
    figures: list[Figure] = []
    save = Figure.savefig

    def save_and_keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)

    def draw_and_check(metrics: Metrics, **options: Any) -> list[Axes]:
        path = tmp_path / "charts" / "run.png"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_chart(metrics, path, **{"title": "a run", **options})
        pixels = imread(path)
        assert pixels.shape[:2] == (1275, 1500)
        assert np.ptp(pixels[..., :3]) > 0.5, "blank"
        return figures[-1].axes

    return draw_and_check


def labels(panel: Axes) -> list[str]:
    legend = panel.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_table_of_ten_steps(tmp_path: Path) -> None:
    """Steps 2 to 10 take 11, ..., 19 ms (mean 15); step 1 takes 900 ms and is in no row."""
    path = tmp_path / "metrics.csv"
    rows = [f"{2.5 if step == 3 else 2},{step},{10 + step if step else 900},{4 - step / 4}" for step in range(10)]
    path.write_text("memory/host_rss_gib,step,step/step_microstep_ms,train/loss\n" + "\n".join(rows) + "\n")
    lines = table_of(summarise(read_metrics(path)))

    assert row(lines, "step_microstep, steps 2 to 10 (ms)") == ["15.00", "11.00", "19.00", "9"]
    assert row(lines, "step_microstep, after step 1 (ms)") == ["15.00", "11.00", "19.00", "9"]
    assert row(lines, "total step time, steps 2 to 10 (ms)")[0] == "not measured"
    assert row(lines, "tokens/s")[0] == "not measured"
    assert row(lines, "host resident memory (GiB)")[0] == "2.50"
    assert row(lines, "loss, first → last")[0] == "4.000 → 1.750"
    assert row(lines, "loss, mean of the last 10")[0] == "2.875"
    assert "900" not in "".join(lines)
    assert "GPU" not in "".join(lines), "a run on CPUs has no GPU memory"


def test_table_fits_80_columns_with_large_numbers() -> None:
    lines = table_of(summarise(a_run(30)), title="with [brackets] and a [red]tag[/red]")
    assert "with [brackets] and a [red]tag[/red]" in lines[0]
    assert row(lines, "tokens/s, after step 1") == ["12,345", "12,345", "12,345", "29"]
    assert row(lines, "GPU peak allocated (GiB)")[0] == "51.90"
    assert row(lines, "host resident memory, peak (GiB)")[0] == "7.50"
    assert "…" not in "".join(lines), "nothing is cut"


def test_table_of_a_run_that_measured_nothing_or_diverged() -> None:
    lines = table_of(summarise({}))
    assert sum("not measured" in line for line in lines) == 7
    diverged = summarise({LOSS: {0: 3.0, 1: math.nan}, STEP_MICROSTEP: {0: 1.0, 1: math.nan}})
    assert row(table_of(diverged), "first → last")[0] == "3.000 → nan"


def test_chart_of_a_full_run(draw: Draw) -> None:
    loss, time, memory = draw(a_run(60), title="costs $5 and $6", entropy=2.5, entropy_label="bigram entropy")
    assert labels(loss) == ["training loss\nmedian of 5", "bigram entropy, 2.500 nats"]
    assert labels(time)[0] == "optimizer (step_microstep)\nmedian of 5; step 1: 5,000 ms"
    assert labels(memory) == ["GPU peak allocated", "host resident memory, peak", "host resident memory"]
    assert [panel.get_ylabel() for panel in (loss, time, memory)] == ["loss (nats)", "time (ms)", "memory (GiB)"]
    assert memory.get_xlabel() == "optimizer step"
    assert memory.get_xticks()[0] == 1
    assert time.get_ylim()[1] < 250, "step 1 is outside of the range"
    assert np.min(loss.lines[0].get_xdata()) == 1
    assert np.min(time.lines[0].get_xdata()) == 2


def test_chart_of_a_few_steps_has_no_median(draw: Draw) -> None:
    loss, time, _ = draw(a_run(12))
    assert labels(loss) == ["training loss"]
    assert labels(time)[1] == "forward (fwd_microstep)\nstep 1: 400.0 ms"


def test_chart_leaves_out_what_is_missing(draw: Draw) -> None:
    run = a_run(30)
    loss, time, memory = draw({name: run[name] for name in (FWD_MICROSTEP, "memory/host_rss_gib")}, entropy=2.5)
    assert [text.get_text() for text in loss.texts] == ["not measured"]
    assert len(labels(time)) == 1
    assert labels(memory) == ["host resident memory"]
    assert "GPU" not in "".join(labels(memory))


def test_chart_of_nothing(draw: Draw) -> None:
    for panel in draw({}):
        assert [text.get_text() for text in panel.texts] == ["not measured"]


def test_chart_of_one_step(draw: Draw) -> None:
    loss, time, _ = draw(a_run(1))
    assert labels(loss) == ["training loss"]
    assert [text.get_text() for text in time.texts] == ["not measured after step 1"]


def test_chart_with_an_optimizer_much_faster_than_the_backward(draw: Draw) -> None:
    _, time, _ = draw(a_run(30, optimizer_ms=1.0))
    assert time.get_yscale() == "log"
    assert time.get_ylabel() == "time (ms, log scale)"


def test_chart_of_a_run_that_diverged(draw: Draw) -> None:
    run = a_run(60)
    run[LOSS].update(dict.fromkeys(range(30, 60), math.nan))
    run[FWD_MICROSTEP] = dict.fromkeys(range(60), math.nan)
    run[BWD_MICROSTEP][40] = math.inf
    loss, time, _ = draw(run)
    assert np.isfinite(loss.get_ylim()).all()
    assert time.get_ylim()[1] < 250


def test_chart_leaves_pyplot_alone(draw: Draw) -> None:
    import matplotlib.pyplot as plt

    draw(a_run(3))
    assert plt.get_fignums() == []
