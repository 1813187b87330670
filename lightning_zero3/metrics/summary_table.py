# SPDX-License-Identifier: Apache-2.0
"""A finished run as a table in the terminal."""

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import GIB_SUFFIX, LAST_LOSSES, RunSummary, Spread

NOT_MEASURED = "not measured"
# In the order of tables and legends.
_MEMORY = (
    names.PEAK_RESERVED,
    names.PEAK_ALLOCATED,
    names.ALLOCATED_BETWEEN_STEPS,
    names.HOST_RSS_PEAK,
    names.HOST_RSS,
)


def memory_label(name: str) -> str:
    """What to call a memory metric in front of a reader; that of the host is never called "GPU".

    Args:
        name: The metric's.

    >>> memory_label("memory/host_rss_peak_gib")
    'host resident memory, peak'
    >>> memory_label("memory/pinned_buffers_gib")
    'pinned buffers'
    """
    if name in names.BY_NAME:
        return names.BY_NAME[name].label
    return name.removeprefix(names.MEMORY_PREFIX).removesuffix(GIB_SUFFIX).replace("_", " ")


def print_table(summary: RunSummary, *, title: str, console: Console | None = None) -> None:
    """Print a run's times (ms), tokens per second, memory (GiB) and losses.

    Args:
        summary: What :func:`~lightning_zero3.metrics.summary.summarise` returned.
        title: Printed as it is, brackets included.
        console: Where to print; a new one on the standard output by default.
    """
    table = Table(
        title=Text(title, style="bold"),
        caption=Text(
            f"{summary.steps} optimizer steps logged. Times are means without step 1, which allocates the optimizer "
            "state. Memory is the largest value of the run."
        ),
    )
    table.add_column("", overflow="fold")
    for heading in ("value", "min", "max", "n"):
        table.add_column(heading, justify="right", no_wrap=True)

    early, later = "steps 2 to 10", "after step 1"
    _add_spread(table, f"step_microstep, {early} (ms)", summary.step_microstep_early)
    _add_spread(table, f"step_microstep, {later} (ms)", summary.step_microstep)
    _add_spread(table, f"total step time, {early} (ms)", summary.step_total_early)
    _add_spread(table, f"total step time, {later} (ms)", summary.step_total)
    _add_spread(table, f"tokens/s, {later}", summary.tokens_per_second)
    table.add_section()
    for name in in_order(summary.memory):
        table.add_row(Text(f"{memory_label(name)} (GiB)"), number_text(summary.memory[name]))
    if not summary.memory:
        table.add_row("memory (GiB)", NOT_MEASURED)
    table.add_section()
    if summary.loss_first is None or summary.loss_last is None or summary.loss_last_mean is None:
        table.add_row("loss, first → last", NOT_MEASURED)
    else:
        table.add_row("loss, first → last", f"{summary.loss_first:.3f} → {summary.loss_last:.3f}")
        table.add_row(f"loss, mean of the last {LAST_LOSSES}", f"{summary.loss_last_mean:.3f}")
    (console or Console()).print(table)


def in_order(metrics: Iterable[str]) -> list[str]:
    """Known memory metrics in the order of their labels, then the others by name.

    Args:
        metrics: Names of metrics.
    """
    known = list(_MEMORY)
    return sorted(metrics, key=lambda name: (known.index(name) if name in known else len(known), name))


def _add_spread(table: Table, label: str, values: Spread | None) -> None:
    if values is None:
        table.add_row(label, NOT_MEASURED)
    else:
        digits = _decimals(values.maximum)
        numbers = [f"{number:,.{digits}f}" for number in (values.mean, values.minimum, values.maximum)]
        table.add_row(label, *numbers, str(values.count))


def number_text(value: float) -> str:
    """A number with about four digits.

    Args:
        value: It.
    """
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """Decimals that leave about four digits. NaN and infinities have none.

    >>> [_decimals(value) for value in (0.0421, 7.5, 261.25, 10400.0)]
    [4, 2, 1, 0]
    """
    if not math.isfinite(value) or value >= 1000:
        return 0
    return 1 if value >= 100 else 2 if value >= 1 else 4
