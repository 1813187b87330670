# SPDX-License-Identifier: Apache-2.0
"""A comparison as a PNG: each step, each phase, and how far the losses are apart. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_zero3.charts import BLUE, GREY, VERMILION, new_figure, save
from lightning_zero3.compare.report import Side, by_step, in_tables
from lightning_zero3.compare.statistics import between, within
from lightning_zero3.compare.tables import figure as figure_text
from lightning_zero3.compare.tables import sentences
from lightning_zero3.metrics import names

_SIDES = (("A", "a", VERMILION, "o"), ("B", "b", BLUE, "s"))
_PHASES = {
    names.STEP_TOTAL: "whole step",
    names.FWD_MICROSTEP: "forward",
    names.BWD_MICROSTEP: "backward",
    names.STEP_MICROSTEP: "optimizer",
}
_MANY = 40  # steps from which points would run into each other
_LETTERS = 132  # of a line above the panels


def draw(report: dict[str, Any], a: Side, b: Side, path: Path) -> None:
    """Draw a comparison.

    Args:
        report: See :func:`lightning_zero3.compare.report.assemble`.
        a: The runs that it was made of; likewise ``b``.
        b: See a.
        path: The PNG file.

    Raises:
        SetupError: There is no matplotlib.
    """
    of_a, of_b = (by_step(side, report["loss_metric"], numbered=False) for side in (a, b))
    apart, noise = _differences(between(of_a, of_b)), _differences([*within(of_a), *within(of_b)])
    lines = any((*apart.values(), *noise.values()))
    made = new_figure(11, 7 if lines else 5.2)
    heights = [5, 3 if lines else 0.8]
    panels = made.subplot_mosaic([["steps", "phases"], ["loss", "loss"]], height_ratios=heights, width_ratios=[3, 2])
    paths = (f"{label}: {', '.join(run['path'] for run in report['runs'][key])}" for label, key, *_ in _SIDES)
    said = sentences(report)[:1]
    heading = "\n".join(fill(_plain(line), _LETTERS) for line in (*paths, *said))
    made.suptitle(heading, fontsize=10, x=0.01, ha="left", linespacing=1.4)
    _draw_steps(panels["steps"], report, a, b)
    _draw_phases(panels["phases"], report)
    _draw_losses(panels["loss"], apart, noise)
    save(made, path)


def _draw_steps(panel: Any, report: dict[str, Any], a: Side, b: Side) -> None:
    """Each step of each run, with its side's mean and range."""
    name = report["first_metric"] or next((each for each in report["metrics"] if in_tables(each)), None)
    name = name or next(iter(report["metrics"]))
    found, warmup = report["metrics"][name], report["warmup"]
    for (label, key, colour, marker), side in zip(_SIDES, (a, b), strict=True):
        mean, low, high = (found[f"{what}_{key}"] for what in ("mean", "min", "max"))
        if None not in (low, high):
            panel.axhspan(low, high, color=colour, alpha=0.12, linewidth=0)
        for number, values in enumerate(by_step(side, name)):
            later = {step: value for step, value in values.items() if step > warmup}
            few = len(later) < _MANY
            style = {"marker": marker if few else "", "markersize": 4, "linewidth": 1.0 if few else 0.8}
            text = f"{label}: mean {figure_text(mean)}, {figure_text(low)} to {figure_text(high)}"
            panel.plot(
                list(later), list(later.values()), color=colour, alpha=0.85, label="" if number else text, **style
            )
        if mean is not None:
            panel.axhline(mean, color=colour, linestyle="--", linewidth=1.2)
    _name(panel, _label(name), "optimizer step of the run", _unit(name))
    left_out = "step 1 is" if warmup == 1 else f"steps 1 to {warmup} are"
    panel.set_title(f"bands: ranges; {left_out} left out", loc="right", fontsize=9, color=GREY)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.22 * (high - low))  # room for the legend
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)


def _draw_phases(panel: Any, report: dict[str, Any]) -> None:
    """Bars of the means, from the smallest to the largest value."""
    phases = {
        name: label
        for name, label in _PHASES.items()
        if name in report["metrics"] and report["metrics"][name]["saved"] is not None
    }
    _name(panel, "Where a step's time goes", "ms", "")
    if not phases:
        _say(panel, "no times in both")
        return
    for offset, (label, key, colour, _) in zip((-0.2, 0.2), _SIDES, strict=True):
        found = [[report["metrics"][name][f"{what}_{key}"] for what in ("mean", "min", "max")] for name in phases]
        heights = [mean for mean, _, _ in found]
        errors = [[mean - low for mean, low, _ in found], [high - mean for mean, _, high in found]]
        places = [place + offset for place in range(len(phases))]
        panel.barh(places, heights, 0.38, color=colour, xerr=errors, ecolor="#222222", capsize=2.5, label=label)
        for place, mean, (_, _, high) in zip(places, heights, found, strict=True):
            panel.annotate(
                figure_text(mean), (high, place), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
    panel.set_yticks(range(len(phases)), list(phases.values()))
    panel.invert_yaxis()
    panel.margins(x=0.25)
    panel.legend(loc="lower right", frameon=False, fontsize=9)


def _draw_losses(panel: Any, apart: Mapping[int, float], noise: Mapping[int, float]) -> None:
    """The largest difference of the losses at each step, beside that of runs of one setting."""
    _name(panel, "Difference of the losses", "optimizer step", "|A - B|")
    if not apart:
        _say(panel, "no loss in both, or no common step")
        return
    if not any((*apart.values(), *noise.values())):
        _say(panel, f"bit-identical at all {len(apart)} common steps")
        return
    for values, label, colour, dashes in (
        (noise, "runs of one setting", GREY, "--"),
        (apart, "A against B", VERMILION, "-"),
    ):
        above = {step: value for step, value in values.items() if value > 0}
        if values:
            same = len(values) - len(above)
            text = label + (f" ({same} of {len(values)} steps bit-identical)" if same else "")
            panel.plot(list(above), list(above.values()), dashes, color=colour, marker=".", linewidth=1.2, label=text)
    panel.set_yscale("log")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(loc="best", frameon=False, fontsize=9)


def _differences(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> dict[int, float]:
    """The largest difference of all pairs at each step, counted from 1; steps without a number are left out."""
    found: dict[int, float] = {}
    for left, right in pairs:
        for step in left.keys() & right.keys():
            apart = abs(left[step] - right[step])
            if apart == apart and apart != float("inf"):
                found[step + 1] = max(found.get(step + 1, 0.0), apart)
    return dict(sorted(found.items()))


def _name(panel: Any, title: str, along: str, up: str) -> None:
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panel.set_xlabel(along)
    panel.set_ylabel(up)
    panel.grid(axis="both", color="#E5E5E5", linewidth=0.6)
    panel.set_axisbelow(True)


def _say(panel: Any, text: str) -> None:
    panel.set(xticks=[], yticks=[], xlabel="", ylabel="")
    panel.grid(False)
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color=GREY, fontsize=11)


def _label(name: str) -> str:
    return names.BY_NAME[name].label if name in names.BY_NAME else _plain(name)


def _unit(name: str) -> str:
    return names.BY_NAME[name].unit if name in names.BY_NAME else ""


def _plain(text: str) -> str:
    """Keep matplotlib from reading dollar signs as formulas."""
    return text.replace("$", r"\$")
