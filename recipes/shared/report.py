# SPDX-License-Identifier: Apache-2.0
"""The end of a recipe: its steps as a table in the terminal, and its course as a chart in a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zero3.charts import BLUE, GREEN, GREY, PURPLE, SKY, VERMILION
from lightning_zero3.metrics.names import (
    BWD_MICROSTEP,
    FWD_MICROSTEP,
    LOSS,
    MEMORY_PREFIX,
    STEP_MICROSTEP,
    STEP_TOTAL,
)
from lightning_zero3.metrics.summary import GIB_SUFFIX, Metrics, early, number_steps
from lightning_zero3.metrics.summary_table import NOT_MEASURED, in_order, memory_label, number_text

# Dashes tell lines apart, beside their colours.
TIMES = {
    STEP_MICROSTEP: ("optimizer (step_microstep)", VERMILION),
    FWD_MICROSTEP: ("forward (fwd_microstep)", BLUE),
    BWD_MICROSTEP: ("backward (bwd_microstep)", GREEN),
}
# Narrow enough for a terminal of 100 characters.
STEP_COLUMNS = {FWD_MICROSTEP: "forward", BWD_MICROSTEP: "backward", STEP_MICROSTEP: "optimizer", STEP_TOTAL: "total"}
# Colour and dashes of each.
MEMORY = {
    "memory/peak_reserved_gib": (SKY, "-"),
    "memory/peak_allocated_gib": (BLUE, "-"),
    "memory/allocated_between_steps_gib": (GREEN, "-"),
    "memory/host_rss_peak_gib": (PURPLE, "--"),
    "memory/host_rss_gib": (VERMILION, "-"),
}
OTHER_MEMORY = ((GREY, "-."), (GREY, ":"), (PURPLE, "-."), (PURPLE, ":"))  # colours and dashes of any other
SMOOTH_FROM = 20  # fewer points are drawn as they are: a median over them would hide more than it shows
LOG_SCALE_FROM = 30.0  # ratio of the medians from which the smaller line would lie on the axis


def running_median(values: Sequence[float], window: int) -> list[float]:
    """Median of the ``window`` values around each value, of those there are at both ends.

    Args:
        values: In any unit; the result has the same.
        window: An odd number of values.

    >>> running_median([1.0, 9.0, 2.0, 3.0], window=3)
    [5.0, 2.0, 3.0, 2.5]
    """
    half = window // 2
    return [float(np.median(values[max(0, at - half) : at + half + 1])) for at in range(len(values))]


def print_steps(metrics: Metrics, *, title: str, warmup: int, console: Console | None = None) -> None:
    """Print each step's loss and times (ms), and the mean, smallest and largest time of steps 2 to 10.

    Args:
        metrics: As :func:`~lightning_zero3.metrics.summary.read_metrics` returns it.
        title: Printed as it is.
        warmup: How many of the first steps are marked as warm-up.
        console: Where to print; a new one on the standard output by default.
    """
    numbered = number_steps(metrics)
    table = Table(title=Text(f"{title}: every step, times in ms", style="bold"))
    table.add_column("step", no_wrap=True)
    for heading in ("loss", *STEP_COLUMNS.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = [LOSS, *STEP_COLUMNS]
    steps = sorted({step for name in columns for step in _from_first_step(numbered, name)})
    for step in steps:
        loss, *times = (numbered.get(name, {}).get(step) for name in columns)
        cells = ["" if loss is None else f"{loss:.6f}", *("" if time is None else number_text(time) for time in times)]
        table.add_row(f"{step}{', warm-up' if step <= warmup else ''}", *cells)
    table.add_section()
    spreads = [early(numbered, name) for name in STEP_COLUMNS]
    for label, what in (("mean of 2 to 10", "mean"), ("min", "minimum"), ("max", "maximum")):
        cells = ["" if values is None else number_text(getattr(values, what)) for values in spreads]
        table.add_row(label, "", *cells)
    (console or Console()).print(table)


def draw_chart(
    metrics: Metrics,
    path: str | Path,
    *,
    title: str,
    entropy: float | None = None,
    entropy_label: str = "unigram entropy",
) -> None:
    """Draw loss, step time and memory over the optimizer steps (from 1) into a PNG.

    A metric that the run didn't log leaves its line out; a panel without any says so. Neither pyplot nor
    matplotlib's choice of a backend is touched, so a training process can call this.

    Args:
        metrics: As :func:`~lightning_zero3.metrics.summary.read_metrics` returns it.
        path: The PNG to write; its folder is made when it is absent, and a file there is replaced.
        title: Printed above the panels as it is.
        entropy: A level to compare the loss with, in nats (the entropy of the data under a simple model).
        entropy_label: What the level is.

    Raises:
        OSError: ``path`` can't be written.
    """
    numbered = number_steps(metrics)
    figure = Figure(figsize=(10, 8.5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor="white")
    FigureCanvasAgg(figure)
    loss_panel, time_panel, memory_panel = figure.subplots(3, 1, sharex=True)
    figure.suptitle(_plain(title), fontsize=13, fontweight="bold", wrap=True)

    _draw_loss(loss_panel, numbered, entropy, _plain(entropy_label))
    _draw_times(time_panel, numbered)
    _draw_memory(memory_panel, numbered)
    last = max((step for values in numbered.values() for step in values), default=1)
    margin = 0.5 + 0.01 * last
    memory_panel.set_xlim(1 - margin, last + margin)
    memory_panel.set_xticks(_step_ticks(last))
    memory_panel.set_xlabel("optimizer step")
    figure.align_ylabels()

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def _draw_loss(panel: Axes, numbered: Metrics, entropy: float | None, entropy_label: str) -> None:
    losses = _from_first_step(numbered, LOSS)
    if losses:
        _add_line(panel, losses, "training loss", BLUE, smooth=True)
        if entropy is not None:
            label = f"{entropy_label}, {entropy:.3f} nats"
            panel.axhline(entropy, color=GREY, linestyle="--", linewidth=1.2, label=label)
    _finish(panel, "Loss", "loss (nats)")


def _draw_times(panel: Axes, numbered: Metrics) -> None:
    """Draw the times from step 2 on: the first one, often 10 times as long, would flatten all the others."""
    medians, unit, first_seen = [], "ms", False
    for name, (label, colour) in TIMES.items():
        values = _from_first_step(numbered, name)
        first = values.pop(1, None)
        first_seen |= first is not None
        if values:
            note = "" if first is None else f"step 1: {number_text(first)} ms"
            _add_line(panel, values, label, colour, note=note, smooth=True)
            medians.append(float(np.median(list(values.values()))))
    if medians and max(medians) > LOG_SCALE_FROM * min(medians) > 0:
        unit = "ms, log scale"
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    elif medians:
        _start_at_zero(panel)
    if medians and first_seen:
        note = "step 1 (dotted) is left out: it allocates the optimizer state"
        panel.set_title(note, loc="right", fontsize=9, color=GREY)
        panel.axvline(1, color=GREY, linestyle=":", linewidth=1.2)
    _finish(panel, "Step time", f"time ({unit})", f"{NOT_MEASURED} after step 1" if first_seen else NOT_MEASURED)


def _draw_memory(panel: Axes, numbered: Metrics) -> None:
    sizes = [name for name in numbered if name.startswith(MEMORY_PREFIX) and name.endswith(GIB_SUFFIX)]
    for at, name in enumerate(in_order(sizes)):
        values = _from_first_step(numbered, name)
        colour, dashes = MEMORY[name] if name in MEMORY else OTHER_MEMORY[at % len(OTHER_MEMORY)]
        if values:
            _add_line(panel, values, _plain(memory_label(name)), colour, dashes=dashes, smooth=False)
    _start_at_zero(panel)
    _finish(panel, "Memory", "memory (GiB)")


def _add_line(
    panel: Axes,
    values: Mapping[int, float],
    label: str,
    colour: str,
    *,
    smooth: bool,
    dashes: str = "-",
    note: str = "",
) -> None:
    """Draw few points as they are; with ``smooth``, many as a thin line with their running median over it."""
    steps, heights, many = list(values), list(values.values()), len(values) >= SMOOTH_FROM
    notes = [note] if note else []
    if many and smooth:
        window = max(5, len(heights) // 30) | 1  # odd, so that it is centred
        panel.plot(steps, heights, color=colour, linewidth=0.6, alpha=0.45)
        heights = running_median(heights, window)
        notes.insert(0, f"median of {window}")
    order = 2 if dashes == "-" else 3  # where two lines lie on each other, the dashed one shows both
    marker = "" if many else "o"  # a single point would have no line
    (line,) = panel.plot(steps, heights, color=colour, linestyle=dashes, linewidth=1.7, marker=marker, markersize=3)
    line.set(zorder=order, label="\n".join([label, "; ".join(notes)]).strip())


def _start_at_zero(panel: Axes) -> None:
    """Let the vertical axis start at 0 and leave room above; only after the last line, as it fixes the limits."""
    panel.set_ylim(0, 1.05 * panel.get_ylim()[1])


def _finish(panel: Axes, name: str, axis_label: str, when_empty: str = NOT_MEASURED) -> None:
    panel.set_title(name, loc="left", fontsize=11, fontweight="bold")
    panel.set_ylabel(axis_label)
    panel.spines[["top", "right"]].set_visible(False)
    if panel.get_legend_handles_labels()[1]:
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)  # never over a line
    else:
        panel.set_yticks([])
        panel.text(0.5, 0.5, when_empty, transform=panel.transAxes, ha="center", va="center", color=GREY)


def _step_ticks(last: int) -> list[int]:
    """Steps to name under the chart: 1, and round ones far enough from it.

    >>> _step_ticks(3), _step_ticks(100)
    ([1, 2, 3], [1, 20, 40, 60, 80, 100])
    """
    if last <= 20:
        return list(range(1, last + 1))
    round_steps = MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True).tick_values(0, last)
    return [1, *(int(step) for step in round_steps if 1 < step <= last)]


def _from_first_step(numbered: Metrics, name: str) -> dict[int, float]:
    return {step: value for step, value in sorted(numbered.get(name, {}).items()) if step >= 1}


def _plain(text: str) -> str:
    """Keep matplotlib from reading dollar signs as formulas, and a leading underscore as "no legend"."""
    return text.replace("$", r"\$").lstrip("_")
