# SPDX-License-Identifier: Apache-2.0
"""The page of metrics in the docs, made from the table in :mod:`lightning_zero3.metrics.names`."""

from __future__ import annotations

from lightning_zero3.metrics.names import METRICS, MetricEntry

_OVER_RANKS = {
    "maximum": "largest",
    "sum": "sum",
    "mean": "mean",
    "counts": "counts added up",
    "minimum": "smallest",
    "rank": "which is largest",
}
_GROUPS = {
    "step": "Time",
    "memory": "Memory",
    "optim": "The optimizer's step",
    "moe": "Experts",
    "ranks": "Spread over ranks",
}
_INTRODUCTION = """# Metrics

What `Zero3Monitor` logs, after every optimizer step that is logged (`Trainer(log_every_n_steps=...)`). All values of a
step travel between ranks in one vector, by one collective; other steps have no collective, synchronisation, allocation
or timer event for metrics. Each logged value is of the step that has just ended. This page is made from
`lightning_zero3/metrics/names.py` by `python docs/generate.py`.
"""


def markdown() -> str:
    """The page, in Markdown."""
    lines = [_INTRODUCTION]
    for group, title in _GROUPS.items():
        lines += [f"## {title}", "", "| name | unit | what it is | ranks | measured |", "|---|---|---|---|---|"]
        lines += [_row(entry) for entry in METRICS if entry.name.startswith(f"{group}/")]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(entry: MetricEntry) -> str:
    name = f"`{entry.name}`"
    if entry.per_layer:
        name += f", `{entry.name}/layer_N`"
    if entry.spread:
        name += " ([spread](#spread-over-ranks))"
    return f"| {name} | {entry.unit} | {entry.definition} | {_OVER_RANKS[entry.over_ranks]} | {entry.measured} |"
