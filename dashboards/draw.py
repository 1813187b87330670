# SPDX-License-Identifier: Apache-2.0
"""Draw the dashboard's panels from Prometheus' answers, with matplotlib: ``python dashboards/draw.py --help``.

For machines without Grafana. It shows the same queries and titles; it isn't Grafana's picture.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

DASHBOARD = Path(__file__).with_name("grafana") / "zero3.json"
GRID_COLUMNS = 24
FORMATS: dict[str, Callable[[float], str]] = {
    "s": EngFormatter(unit="s").format_eng,
    "bytes": lambda value: f"{value / 2**30:,.4g} GiB",
    "percentunit": lambda value: f"{value:.1%}",
    "short": EngFormatter().format_eng,
}


def series(url: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """Prometheus' answer to a range query, about 200 points."""
    step = max(1.0, (end - start) / 200)
    parameters = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{parameters}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's ``{{label}}`` filled in.

    >>> legend("rank {{rank}}", {"rank": "3"})
    'rank 3'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def draw(url: str, run: str, start: float, end: float, path: Path) -> None:
    """Draw every panel where the dashboard has it."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(18, rows * 0.42), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, GRID_COLUMNS)
    figure.suptitle(
        f"dashboards/grafana/zero3.json, run {run}: its queries' answers from Prometheus, drawn with matplotlib",
        fontsize=13,
    )
    for panel in panels:
        where = panel["gridPos"]
        axes = figure.add_subplot(grid[where["y"] : where["y"] + where["h"], where["x"] : where["x"] + where["w"]])
        axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        unit = panel["fieldConfig"]["defaults"]["unit"]
        lines = [
            (
                legend(target["legendFormat"], each["metric"]),
                [(float(at), float(value)) for at, value in each["values"]],
            )
            for target in panel["targets"]
            for each in series(url, target["expr"].replace("$run", run), start, end)
        ]
        if panel["type"] == "stat" or not lines:
            text = FORMATS[unit](lines[0][1][-1][1]) if lines else "no data"
            size = 20 if lines else 11
            axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=size, transform=axes.transAxes)
            axes.set_axis_off()
        else:
            _chart(axes, panel, lines, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _chart(axes: Axes, panel: dict[str, Any], lines: list[tuple[str, list[tuple[float, float]]]], unit: str) -> None:
    stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    if stacked:
        shortest = min((points for _, points in lines), key=len)
        times = [_time(at) for at, _ in shortest]
        axes.stackplot(
            times, [[value for _, value in points[-len(times) :]] for _, points in lines], labels=[n for n, _ in lines]
        )
    else:
        for name, points in lines:
            axes.plot([_time(at) for at, _ in points], [value for _, value in points], label=name, linewidth=1.2)
        if unit == "bytes":
            axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: FORMATS[unit](value))
    axes.tick_params(labelsize=7)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.legend(fontsize=7, loc="best")


def _time(at: float) -> Any:
    return datetime.fromtimestamp(at, tz=timezone.utc)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels with matplotlib.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--run", required=True, help="the label of the run")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"))
    arguments = parser.parse_args()
    now = time.time()
    draw(arguments.prometheus, arguments.run, now - 60 * arguments.minutes, now, arguments.out)
