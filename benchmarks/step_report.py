# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/step_cost.py prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_arms import SWITCHES


def print_table(report: dict[str, Any]) -> None:
    """Every case in a row; then each switch alone."""
    rows = [(report["versions"]["deepspeed"], case) for case in report["cases"]]
    rows += [(other["versions"]["deepspeed"], case) for other in report["also"] for case in other["cases"]]
    print(
        f"\n{'DeepSpeed':>10}{'ranks':>6} {'model':<18}{'optimizer':<12}{'sub-groups':>11}{'stock → ours, ms':>20}"
        f"{'ratio':>7}{'floor':>7}{'collectives':>13}{'peak bytes, stock → ours':>27}  bits"
    )
    for release, case in rows:
        times = f"{case['stock_ms']:.1f} → {case['ours_ms']:.2f}"
        launched = f"{case['collectives_stock']} → {case['collectives_ours']}"
        peaks = f"{case['peak_bytes_stock']:,} → {case['peak_bytes_ours']:,}"
        bits = "same" if case["same_bits"] else "DIFFER"
        floor = f"{case['floor_ms']:.2f}"
        print(
            f"{release:>10}{case['ranks']:>6} {case['model']:<18}{case['optimizer']:<12}{case['sub_groups']:>11}"
            f"{times:>20}{case['ratio']:>7.3f}{floor:>7}{launched:>13}{peaks:>27}  {bits}"
        )
    alone = [case for _, case in rows if case.get("switches")]
    if alone:
        print(f"\n{'ranks':>5} {'optimizer':<12}" + "".join(f"{name:>29}" for name in SWITCHES) + "   (ratio, alone)")
    for case in alone:
        ratios = "".join(f"{case['switches'][name]:>29.3f}" for name in SWITCHES)
        print(f"{case['ranks']:>5} {case['optimizer']:<12}{ratios}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Step times per case, and against the number of sub-groups."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stock, ours, grey = "#D55E00", "#0072B2", "#777777"
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    cases = [case for case in report["cases"] if "switches" in case]
    for place, case in enumerate(cases):
        for offset, key, colour, label in (
            (-0.27, "stock_ms", stock, "DeepSpeed's own"),
            (0.0, "ours_ms", ours, "zero3_fast"),
            (0.27, "floor_ms", grey, "floor"),
        ):
            bar = left.bar(place + offset, case[key], 0.25, color=colour, label=label if place == 0 else None)
            left.bar_label(bar, [f"{case[key]:.1f}"], fontsize=8)
    left.set_xticks(range(len(cases)), [f"{c['optimizer']}\n{c['ranks']} rank{'s' * (c['ranks'] > 1)}" for c in cases])
    left.set(ylabel="optimizer step (ms)", yscale="log", title="GLM-4.5-Air's structure, 137 sub-groups")
    left.margins(y=0.25)  # room for the legend above the bars
    growing = [case for case in report["cases"] if "switches" not in case]
    for key, colour, label in (
        ("stock_ms", stock, "DeepSpeed's own"),
        ("ours_ms", ours, "zero3_fast"),
        ("floor_ms", grey, "floor"),
    ):
        right.plot([c["sub_groups"] for c in growing], [c[key] for c in growing], marker="o", color=colour, label=label)
    right.set(xscale="log", yscale="log", xlabel="sub-groups", ylabel="optimizer step (ms)", title="2,048 parameters")
    right.set_xticks([c["sub_groups"] for c in growing], [str(c["sub_groups"]) for c in growing])
    right.minorticks_off()
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
