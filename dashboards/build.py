# SPDX-License-Identifier: Apache-2.0
"""Write ``dashboards/grafana/zero3.json``: ``python dashboards/build.py``.

By Grafana's own builders (grafana-foundation-sdk), and with metric names from the package's table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableRefresh

from lightning_zero3.metrics import names
from lightning_zero3.metrics.prometheus import CAPACITY, RANKS, STEP, series_of

PATH = Path(__file__).with_name("grafana") / "zero3.json"
RUN = 'run=~"$run"'
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
STATS, WIDTH, HEIGHT, STAT_HEIGHT = 6, 8, 8, 4


class Query(NamedTuple):
    """A PromQL expression and how Grafana names its series."""

    expression: str
    legend: str


def one(name: str, legend: str, labels: str = "") -> Query:
    """A metric over all ranks."""
    return Query(f"{series_of(names.BY_NAME[name]).name}{{{RUN}{labels}}}", legend)


def rank_series(name: str) -> str:
    """Each rank's values of a metric."""
    return f"{series_of(names.BY_NAME[name], of_each_rank=True).name}{{{RUN}}}"


def over_ranks(name: str) -> list[Query]:
    """Largest, middle and smallest of all ranks, and which is the largest."""
    values = rank_series(name)
    return [
        Query(f"topk by (run) (1, {values})", "largest: rank {{rank}}, node {{node}}"),
        Query(f"quantile by (run) (0.5, {values})", "median"),
        Query(f"min by (run) ({values})", "smallest"),
    ]


def per_layer(name: str) -> list[Query]:
    """A router metric of each layer."""
    return [one(name, "{{layer}}", ', layer!="all"')]


class Chart(NamedTuple):
    """A panel over time."""

    title: str
    unit: str
    queries: Sequence[Query]
    description: str = ""
    stacked: bool = False


NUMBERS = (
    Chart("Optimizer steps", "short", [Query(f"{STEP}{{{RUN}}}", "steps")]),
    Chart("Ranks", "short", [Query(f"{RANKS}{{{RUN}}}", "ranks")]),
    Chart("Loss", "short", [one(names.LOSS_OF_STEP, "loss")]),
    Chart("Tokens per second", "short", [one(names.TOKENS_PER_SECOND, "tokens/s")]),
    Chart("MFU", "percentunit", [one(names.MFU, "MFU")]),
    Chart("Skipped steps", "short", [one(names.SKIPPED_STEPS, "skipped")]),
)
CHARTS = (
    Chart(
        "Where a step's time goes",
        "s",
        [
            one(names.FWD, "forward"),
            one(names.BWD, "backward"),
            one(names.STEP_MICROSTEP, "optimizer (step_microstep)"),
            one(names.DATA_WAIT, "between batches"),
        ],
        "Each the slowest rank's, stacked; compare with the whole step beside it.",
        stacked=True,
    ),
    Chart(
        "Whole step, and inside it",
        "s",
        [
            one(names.STEP_TOTAL, "whole step"),
            one(names.BWD_ALLREDUCE, "reduction after backward"),
            one(names.OPTIMIZER_STEP, "optimizer's update"),
        ],
    ),
    Chart(
        "Tokens per second",
        "short",
        [one(names.TOKENS_PER_SECOND, "all ranks"), one(names.DEVICE_TOKENS_PER_SECOND, "per device")],
    ),
    Chart("Model FLOPs utilisation", "percentunit", [one(names.MFU, "MFU")]),
    Chart("Loss", "short", [one(names.LOSS_OF_STEP, "loss")]),
    Chart(
        "Gradient norm and learning rate",
        "short",
        [one(names.GRAD_NORM, "gradient norm"), one(names.LEARNING_RATE, "learning rate")],
    ),
    Chart(
        "GPU memory against capacity",
        "bytes",
        [
            one(names.PEAK_RESERVED, "peak reserved, fullest rank"),
            one(names.PEAK_ALLOCATED, "peak allocated, fullest rank"),
            one(names.ALLOCATED_BETWEEN_STEPS, "between steps, fullest rank"),
            Query(f'{CAPACITY}{{{RUN}, of="gpu"}}', "capacity of a GPU"),
        ],
    ),
    Chart(
        "Host memory against capacity",
        "bytes",
        [
            Query(f"sum by (run, node) ({rank_series(names.HOST_RSS)})", "node {{node}}, all its ranks"),
            Query(f'{CAPACITY}{{{RUN}, of="host"}}', "capacity of a node"),
        ],
    ),
    Chart("Allocator retries", "short", [one(names.ALLOCATOR_RETRIES, "retries since the start")]),
    Chart("Forward over ranks", "s", over_ranks(names.FWD)),
    Chart("Backward over ranks", "s", over_ranks(names.BWD)),
    Chart("Wait for data over ranks", "s", over_ranks(names.DATA_WAIT)),
    Chart("Fullest expert over the mean", "short", per_layer(names.EXPERT_LOAD), "1 is even."),
    Chart("Entropy of the experts' shares", "short", per_layer(names.EXPERT_ENTROPY), "1 is even, 0 a single expert."),
    Chart("Dead experts", "short", per_layer(names.DEAD_EXPERTS)),
)


def build() -> Any:
    """The dashboard."""
    board = (
        dashboard.Dashboard("lightning_zero3")
        .uid("lightning-zero3")
        .description("Where a step's time and memory go, over all ranks: Zero3Monitor(prometheus_port=...).")
        .tags(["lightning_zero3", "training"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .label("Run")
            .datasource(SOURCE)
            .query({"query": f"label_values({STEP}, run)", "refId": "run"})
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(False)
        )
    )
    width = 24 // STATS
    for at, chart in enumerate(NUMBERS):
        where = GridPos(h=STAT_HEIGHT, w=width, x=width * at, y=0)
        board.with_panel(_panel(stat.Panel().id(at + 1), chart, where))
    for at, chart in enumerate(CHARTS):
        row, column = divmod(at, 24 // WIDTH)
        where = GridPos(h=HEIGHT, w=WIDTH, x=WIDTH * column, y=STAT_HEIGHT + HEIGHT * row)
        panel = (
            timeseries.Panel()
            .id(len(NUMBERS) + at + 1)
            .fill_opacity(40.0 if chart.stacked else 0.0)
            .show_points("auto")
        )
        if chart.stacked:
            panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        board.with_panel(_panel(panel, chart, where))
    return board.build()


def _panel(panel: Any, chart: Chart, where: GridPos) -> Any:
    panel.title(chart.title).unit(chart.unit).datasource(SOURCE).grid_pos(where)
    if chart.description:
        panel.description(chart.description)
    for letter, query in zip("ABCDEFGH", chart.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
        panel.with_target(target.range())
    return panel


def text() -> str:
    """The file's content."""
    return json.dumps(_without_nulls(json.loads(JSONEncoder().encode(build()))), sort_keys=True, indent=2) + "\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    PATH.write_text(text())
