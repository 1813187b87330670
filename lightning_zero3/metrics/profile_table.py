# SPDX-License-Identifier: Apache-2.0
"""A profile's phases as a table for a terminal, as Markdown, and as numbers for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zero3.metrics.profile_figures import PhaseFigures

NO_DEVICE = "no device"
_UNKNOWN = "–"
_COLUMNS = 7  # without those of memory


@dataclass(frozen=True)
class Profile:
    """A finished profile, of one rank.

    Args:
        steps: First and last optimizer step, as ``trainer.global_step`` counts them.
        rank: Whose it is.
        ranks: How many there are.
        device: The device's name; None without one.
        phases: See :func:`lightning_zero3.metrics.profile_figures.figures`.
        traces: File name of this rank's trace.
        notes: What else a reader has to know.
    """

    steps: tuple[int, int]
    rank: int
    ranks: int
    device: str | None
    phases: Sequence[PhaseFigures]
    traces: str
    notes: Sequence[str] = ()

    @property
    def steps_text(self) -> str:
        """Which steps, in words."""
        first, last = self.steps
        return f"step {first}" if first == last else f"steps {first} to {last}"


def as_numbers(profile: Profile) -> dict[str, Any]:
    """For JSON; what wasn't measured is null.

    Args:
        profile: It.
    """
    phases = [{"phase": phase.path[-1], **asdict(phase), "path": list(phase.path)} for phase in profile.phases]
    return {
        "steps": list(profile.steps),
        "rank": profile.rank,
        "ranks": profile.ranks,
        "device": profile.device,
        "phases": phases,
        "trace": profile.traces,
        "notes": list(profile.notes),
    }


def headings(profile: Profile) -> list[str]:
    """Of the table's columns.

    Args:
        profile: It.
    """
    counted = "CPU ops" if profile.device is None else "kernels"
    named = ["", "calls", "CPU ms", "device ms", counted, "collectives", "visits"]
    return [*named, "peak MiB", "kept MiB"] if _has_memory(profile) else named


def rows(profile: Profile) -> list[list[str]]:
    """The table's cells, phases indented by what they lie in.

    Args:
        profile: It.
    """
    found = []
    for phase in profile.phases:
        counted = phase.cpu_operations if profile.device is None else phase.kernels
        cells = [
            "  " * (len(phase.path) - 1) + phase.path[-1],
            _number(phase.calls, 1),
            _number(phase.cpu_ms, 2),
            NO_DEVICE if phase.device_ms is None else _number(phase.device_ms, 2),
            _number(counted, 1),
            _number(phase.collectives, 1),
            _number(phase.parameter_visits, 1),
        ]
        memory = [_number(phase.memory_peak_mib, 2), _number(phase.memory_kept_mib, 2)]
        found.append(cells + memory if _has_memory(profile) else cells)
    return found


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if digits == 1 and value == round(value) else f"{value:,.{digits}f}"


def _has_memory(profile: Profile) -> bool:
    return any(phase.memory_peak_mib is not None for phase in profile.phases)


def caption(profile: Profile) -> list[str]:
    """What the figures are.

    Args:
        profile: It.
    """
    means = "" if profile.steps[0] == profile.steps[1] else "means over "
    said = [
        f"Rank {profile.rank} of {profile.ranks}, {means}{profile.steps_text}, each phase with what it calls.",
        "CPU ms is host time from a phase's start to its end, waiting included; the profiler itself takes some of it, "
        "for each operation and region.",
    ]
    if profile.device is None:
        said.append(
            "No device: this ran on a CPU, so there is no device time; CPU ops, torch operations that call no other, "
            "stand in for kernels."
        )
    else:
        said.append(f"Device ms is what kernels and copies took on {profile.device}, added up, launched in that phase.")
    said.append("Visits are parameters that clears and the release looked at.")
    if _has_memory(profile):
        where = "host" if profile.device is None else "device"
        said.append(f"Peak is the most {where} memory over that at a phase's start, kept what it left behind.")
    return [*said, *profile.notes]


def show(profile: Profile, console: Console | None = None) -> None:
    """Print the table.

    Args:
        profile: It.
        console: Where to print; a new one on the standard output by default.
    """
    console = console or Console()
    heads, cells = headings(profile), rows(profile)
    titles = [f"Profile of {profile.steps_text}", f"Memory of {profile.steps_text}"]
    # Memory by itself: a terminal of 80 columns has no room for all.
    for title, columns in zip(titles, _parts(len(heads)), strict=False):
        table = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        for number in columns:
            table.add_column(heads[number], justify="right" if number else "left", no_wrap=True)
        for row in cells:
            table.add_row(*(Text(row[number]) for number in columns))
        console.print(table)
    console.print(Text(" ".join(caption(profile))), soft_wrap=False)


def _parts(columns: int) -> list[list[int]]:
    first = list(range(min(columns, _COLUMNS)))
    return [first] if columns == _COLUMNS else [first, [0, *range(_COLUMNS, columns)]]


def markdown(profile: Profile) -> str:
    """The same as a page.

    Args:
        profile: It.
    """
    heads = headings(profile)
    lines = [
        f"# Profile of {profile.steps_text}",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
    ]
    # Markdown drops spaces at a cell's beginning.
    for first, *others in rows(profile):
        name = first.lstrip(" ")
        lines.append("| " + " | ".join(["&nbsp;" * (len(first) - len(name)) + name, *others]) + " |")
    return "\n".join([*lines, "", *(f"- {said}" for said in caption(profile))]) + "\n"
