# SPDX-License-Identifier: Apache-2.0
"""Charts of plans, as PNG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zero3.charts import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, new_figure, save
from lightning_zero3.plan.tables import combination

_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)
_MOST_BARS = 24
_TIMES = (
    ("compute_seconds", "compute"),
    ("node_links_seconds", "links in the node"),
    ("network_seconds", "network"),
    ("host_link_seconds", "host's link"),
    ("optimizer_seconds", "the optimizer step"),
)


def draw_sweep(found: dict[str, Any], path: Path) -> None:
    """Bars of memory and of least times for each combination that fits.

    Args:
        found: See :func:`lightning_zero3.plan.sweep.swept`.
        path: The PNG file.

    Raises:
        SetupError: There is no matplotlib.
    """
    rows = found["combinations"][:_MOST_BARS]
    figure = new_figure(12, 1.8 + 0.3 * max(1, len(rows)))
    left, right = figure.subplots(1, 2, sharey=True)
    labels = []
    for experts, tensors, precision, moved in map(combination, rows):
        labels.append(f"EP {experts}, TP {tensors}, {precision}" + (f", {moved} on host" if moved != "none" else ""))
    places = list(range(len(rows)))
    left.barh(places, [r["total_gib"] for r in rows], color=SKY, label="at the peak, with an allowance")
    left.barh(places, [r["between_steps_gib"] for r in rows], color=_COLOURS[0], label="between steps")
    left.axvline(found["gpu_gib"], color="black", linewidth=1, linestyle="--")
    left.set_yticks(places, labels, fontsize=8)
    left.invert_yaxis()
    left.set(xlabel=f"GiB of the {found['gpu_gib']} of an {found['gpu']}", title="Memory of one rank")
    thickness = 0.8 / len(_TIMES)
    for number, ((name, label), colour) in enumerate(zip(_TIMES, _COLOURS, strict=True)):
        times = [1e6 * r[name] / r["tokens_per_step"] for r in rows]
        where = [place + thickness * (number + 0.5) - 0.4 for place in places]
        right.barh(where, times, thickness, color=colour, label=label)
    whole = [r["seconds_per_million_tokens"] for r in rows]
    right.plot(whole, places, "k|", markersize=12, label="the step, as far as it overlaps")
    right.set(xlabel="s per million tokens", title="Lower bounds of times")
    for panel in (left, right):
        panel.grid(axis="x", alpha=0.3)
        panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    figure.suptitle(f"{found['title']}: {found['world_size']} GPUs")
    save(figure, path)


def draw_scale(found: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Lines over the number of ranks, one file for each quantity.

    Args:
        found: Of several models, see :func:`lightning_zero3.plan.scale.scaled`.
        folder: Where to; files are called ``plan_….png``.

    Returns:
        The files.

    Raises:
        SetupError: There is no matplotlib.
    """
    files = []
    for name, label, lines in (
        ("memory", "GiB per rank", (("total_gib", "-", "peak"), ("between_steps_gib", "--", "between steps"))),
        ("sub_groups", "sub-groups", (("sub_groups", "-", ""),)),
        (
            "collectives",
            "collectives of an optimizer step",
            (("collectives_stock", "--", "DeepSpeed's own"), ("collectives_ours", "-", "zero3_fast")),
        ),
        ("bytes", "GiB that a rank sends in a step", (("sent_gib", "-", ""),)),
    ):
        figure = new_figure(7, 4.5)
        panel = figure.subplots()
        for model, colour in zip(found, _COLOURS, strict=False):
            ranks = [point["ranks"] for point in model["points"]]
            for key, style, what in lines:
                title = model["title"].partition(",")[0] + (f", {what}" if what else "")
                values = [point[key] for point in model["points"]]
                panel.plot(ranks, values, style, color=colour, marker="o", markersize=4, label=title)
        every = sorted({point["ranks"] for model in found for point in model["points"]})
        panel.set(xscale="log", xlabel="ranks", ylabel=label)
        panel.set_xticks(every, [f"{ranks:,}" for ranks in every])
        panel.minorticks_off()
        if name == "memory":
            panel.set_yscale("log")
            panel.axhline(found[0]["gpu_gib"], color="black", linewidth=1, linestyle=":", label=found[0]["gpu"])
        elif name == "collectives":
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
        path = folder / f"plan_{name}.png"
        save(figure, path)
        files.append(path)
    return files
