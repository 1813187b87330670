# SPDX-License-Identifier: Apache-2.0
"""What every chart of this package begins and ends with. Needs matplotlib, and touches neither pyplot nor a backend."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from lightning_zero3.config import SetupError

# Okabe and Ito's palette: its colours stay apart under every common colour blindness.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
GREY = "#595959"


def require_drawable(chart: Path) -> None:
    """Refuse a file that can't be drawn in, before the work whose result it would show.

    Args:
        chart: The file of ``--chart``.

    Raises:
        SetupError: matplotlib is missing, the file is no PNG, or it can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError(f"--chart {chart} needs matplotlib: pip install matplotlib")
    if chart.suffix.lower() != ".png":
        raise SetupError(f"--chart {chart}: a file whose name ends in .png.")
    if chart.is_dir() or not os.access(chart if chart.exists() else chart.parent, os.W_OK):
        raise SetupError(f"--chart {chart} can't be written: a file in a folder that exists and can be written to.")


def new_figure(width: float, height: float) -> Any:
    """An empty figure.

    Args:
        width: Inches; likewise the height.
        height: See width.

    Raises:
        SetupError: There is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SetupError("A chart needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure, its panels open at the top and the right.

    Args:
        figure: See :func:`new_figure`.
        path: The PNG file.
    """
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
