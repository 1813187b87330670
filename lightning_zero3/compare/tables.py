# SPDX-License-Identifier: Apache-2.0
"""A comparison in words, as a table for a terminal, and as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zero3.compare.report import in_tables
from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names

_HEADINGS = ("", "A", "B", "saved", "ranges, t (df)")
_NONE = "–"


def figure(value: float | None) -> str:
    """A number with the digits that a reader compares.

    Args:
        value: It, or None.

    >>> [figure(value) for value in (4182.13, 210.4, -0.8491, 0.00372, 735.0, None)]
    ['4,182.1', '210.40', '-0.849', '0.00372', '735', '–']
    """
    if value is None:
        return _NONE
    if value == round(value):
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def sentences(report: dict[str, Any]) -> list[str]:
    """What the comparison says.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
    """
    said = [_of_the_first(report), _of_the_whole_step(report), _of_the_runs(report), _of_other_times(report)]
    said.append(_of_visits(report))
    said += [_of_values(report, "loss", "Loss"), _of_values(report, "grad_norm", "Gradient norm")]
    return [*(each for each in said if each), *report["notes"]]


def _of_the_first(report: dict[str, Any]) -> str:
    name = report["first_metric"]
    if name is None or report["metrics"][name]["saved"] is None:
        return ""
    found = report["metrics"][name]
    saved, share = found["saved"], report["share_of_step"].get(name)
    of_step = f", {_percent(abs(share))} of A's whole step" if share is not None and name != names.STEP_TOTAL else ""
    ranges = (
        f"{figure(found['min_a'])} to {figure(found['max_a'])} against {figure(found['min_b'])} to "
        f"{figure(found['max_b'])} ms"
    )
    t = "" if found["t"] is None else f", t = {found['t']:.1f} over {found['n_a']} and {found['n_b']} steps"
    if min(found["n_a"], found["n_b"]) < 2:
        verdict = f"That is of {found['n_a']} and {found['n_b']} steps, too few for a range."
    elif not found["ranges_overlap"]:
        verdict = f"The ranges don't overlap: {ranges}{t}."
    elif report["clear"][name]:
        verdict = f"The ranges overlap ({ranges}), but the difference of the means is clear{t}."
    else:
        verdict = f"The ranges overlap ({ranges}), and the difference may be chance{t}."
    return (
        f"{name}: {figure(found['mean_a'])} → {figure(found['mean_b'])} ms, {_less_or_more(saved)}{of_step}. {verdict}"
    )


def _of_the_whole_step(report: dict[str, Any]) -> str:
    whole = report["whole_step"]
    if whole is None or whole["saved"] is None or whole["drift"] is None:
        return ""
    saved, drift = report["metrics"][report["first_metric"]]["saved"], abs(whole["drift"])
    said = (
        f"Whole step: {figure(whole['mean_a'])} → {figure(whole['mean_b'])} ms, {_less_or_more(whole['saved'])}, where "
        f"this alone would make it {_less_or_more(saved)}; the other {figure(drift)} ms is other parts of the step, or "
        "drift between the runs"
    )
    return said + (", more than what is saved, so whole steps can't show it." if drift > abs(saved) else ".")


def _less_or_more(saved: float) -> str:
    return f"{figure(abs(saved))} ms {'less' if saved >= 0 else 'more'}"


def _of_the_runs(report: dict[str, Any]) -> str:
    """The noise of two equal runs, beside what is saved."""
    name = report["first_metric"]
    apart = (report["noise_floor"] or {"means": {}})["means"].get(name)
    saved = None if name is None else report["metrics"][name]["saved"]
    if apart is None or saved is None:
        return ""
    verdict = "less than" if apart < abs(saved) else "no less than"
    return f"Means of runs of one setting differ by up to {figure(apart)} ms: {verdict} what is saved."


def _of_other_times(report: dict[str, Any]) -> str:
    """Parts of a step whose means differ by more than chance and the runs of one setting do."""
    means = (report["noise_floor"] or {"means": {}})["means"]
    clear = [
        name
        for name in report["share_of_step"]
        if report["clear"][name]
        and name not in (report["first_metric"], names.STEP_TOTAL)
        and abs(report["metrics"][name]["saved"]) > means.get(name, 0)
    ]
    told = (f"{name} {_less_or_more(report['metrics'][name]['saved'])}" for name in clear)
    return f"Clear as well: {', '.join(told)}." if clear else ""


def _of_visits(report: dict[str, Any]) -> str:
    cost = report["cost_per_avoided_visit"]
    if cost is None:
        return ""
    return (
        f"{cost['avoided_visits']:,.0f} parameter visits avoided per step: {cost['microseconds']:.2f} µs for each "
        f"({figure(cost['saved_ms'])} ms)."
    )


def _of_values(report: dict[str, Any], key: str, label: str) -> str:
    found = report[key]
    identical, largest = found["step1_identical"], found["largest_difference"]
    if identical is None and largest is None:
        return ""
    begins = {True: "bit-identical at step 1", False: "not the same at step 1", None: "begins at different steps"}
    said = f"{label}: {begins[identical]}"
    if largest is not None:
        said += ", and after it" if largest == 0 and identical else f"; largest difference after it {largest:.2g}"
    floor = (report["noise_floor"] or {key: {"largest_difference": None}})[key]["largest_difference"]
    if floor is not None and largest:
        within = "within" if largest <= floor else "above"
        said += f" ({within} the noise of runs of one setting, {floor:.2g})"
    return said + "."


def rows(report: dict[str, Any], patterns: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The table's cells.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        patterns: Names, or patterns as a shell's, of what is shown; by default costs over all ranks and layers that
            aren't the same in both.
    """
    found = []
    known = list(names.BY_NAME)
    shown = [name for name in report["metrics"] if _is_shown(report, name, patterns)]
    for name in sorted(shown, key=lambda each: known.index(each) if each in known else len(known)):
        each = report["metrics"][name]
        sides = [
            f"{figure(each[f'mean_{side}'])}\n{figure(each[f'min_{side}'])}–{figure(each[f'max_{side}'])}"
            for side in ("a", "b")
        ]
        share = report["share_of_step"].get(name)
        saved = figure(each["saved"]) + ("" if share is None else f"\n{_percent(share)}")
        overlap = {True: "overlap", False: "apart", None: _NONE}[each["ranges_overlap"]]
        t = "" if each["t"] is None else f"\n{each['t']:.1f} ({each['df']:.1f})"
        found.append((name, *sides, saved, overlap + t))
    return found


def left_out(report: dict[str, Any], patterns: Sequence[str] = ()) -> int:
    """How many of the metrics the table doesn't show.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        patterns: As for :func:`rows`.
    """
    return sum(not _is_shown(report, name, patterns) for name in report["metrics"])


def require_matches(report: dict[str, Any], patterns: Sequence[str]) -> None:
    """Refuse patterns that leave a table empty.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        patterns: As for :func:`rows`.

    Raises:
        SetupError: One of them is of no metric that both sides have.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in report["metrics"]):
            raise SetupError(f"--metrics {pattern}: no such metric in both. There are {', '.join(report['metrics'])}.")


def _is_shown(report: dict[str, Any], name: str, patterns: Sequence[str]) -> bool:
    if patterns:
        return any(fnmatchcase(name, pattern) for pattern in patterns)
    found = report["metrics"][name]
    differs = any(found[f"{what}_a"] != found[f"{what}_b"] for what in ("mean", "min", "max"))
    return differs and in_tables(name)


def _title(report: dict[str, Any]) -> list[str]:
    return [f"{label.upper()}: {', '.join(run['path'] for run in report['runs'][label])}" for label in ("a", "b")]


def _caption(report: dict[str, Any], patterns: Sequence[str]) -> str:
    warmup = report["warmup"]
    first = "step 1" if warmup == 1 else f"steps 1 to {warmup}"
    more = left_out(report, patterns)
    others = f" Not shown: {more} more, see --metrics '*' or --json." if more else ""
    return (
        f"Means over steps, with the smallest and the largest; {first} of each run left out. Saved: A less B, and of "
        f"times the share of A's whole step. t: Welch's, and degrees of freedom.{others}"
    )


def show(report: dict[str, Any], patterns: Sequence[str] = (), console: Console | None = None) -> None:
    """Print the comparison.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        patterns: As for :func:`rows`.
        console: Where to; standard output if None.
    """
    out = console or Console()
    for line in _title(report):
        out.print(Text(line, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption=Text(_caption(report, patterns)), caption_justify="left")
    for place, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=place != 0, overflow="fold")
    cells = rows(report, patterns)
    for row in cells:
        # Two lines, so that the numbers have room in a terminal of 80 characters.
        table.add_row(*map(Text, (row[0].replace("/", "/\n", 1), *row[1:])))
    out.print(table if cells else Text("What a step costs is the same in both, in all metrics."))
    for said in sentences(report):
        out.print(Text(f"• {said}"))


def markdown(report: dict[str, Any], patterns: Sequence[str] = ()) -> str:
    """The comparison as a page.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        patterns: As for :func:`rows`.
    """
    lines = [*(f"**{line}**  " for line in _title(report)), ""]
    lines += [f"| {' | '.join(_HEADINGS)} |", "|---|---:|---:|---:|---:|"]
    for row in rows(report, patterns):
        name, *sides, saved, t = (cell.replace("|", "\\|") for cell in row)
        cells = [name, *(f"{side.replace(chr(10), ' (')})" for side in sides)]
        cells += [cell.replace("\n", ", ") for cell in (saved, t)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _caption(report, patterns), "", *(f"- {said}" for said in sentences(report))]
    return "\n".join(lines)
