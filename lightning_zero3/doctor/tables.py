# SPDX-License-Identifier: Apache-2.0
"""The report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report.

    Args:
        report: See :func:`lightning_zero3.doctor.report.assemble`.
        console: Where to; standard output if None.
    """
    out = console or Console(soft_wrap=False)
    out.print(f"Python {report['python']}", markup=False)
    _table(
        out,
        "Packages",
        ("package", "version", "asked for", "needed for"),
        [(p["name"], p["version"] or "missing", p["required"], p["needed_for"]) for p in report["packages"]],
    )
    _table(
        out,
        "Compilers",
        ("tool", "where", "version", "problem"),
        [(t["name"], t["path"] or "none", t["version"], t["problem"]) for t in report["tools"]],
    )
    if report["accelerator"]:
        seen = report["accelerator"]
        rows = [("devices", device["name"], _gib(device["memory_gib"])) for device in seen["devices"]]
        chosen = f"DeepSpeed uses {seen['deepspeed']} with {seen['backend']}, by {seen['set_by']}"
        chosen += f"; torch is for {seen['torch_for']}"
        _table(out, "Accelerator", ("", chosen, "memory"), rows)
    links = report["links"]
    rows = [
        (name, "network interface", f"{speed} Mbit/s" if speed else "") for name, speed in links["interfaces"].items()
    ]
    rows += [(f"{x['device']}:{x['port']}", x["kind"], f"{x['rate']}, {x['state']}") for x in links["infiniband"]]
    _table(out, "Links", ("link", "kind", "rate"), rows)
    if links["gpu_topology"]:
        out.print(links["gpu_topology"], markup=False, highlight=False)
    _table(
        out,
        "Faults and costs of DeepSpeed's Stage 3",
        ("part", "upstream", "ours", "how that was found"),
        [(f["name"], f["upstream"], "acts" if f["ours"] else "stands aside", f["how"]) for f in report["fixes"] or []],
    )
    _table(
        out,
        "What the installed packages can't do together",
        ("limit", "here", "what follows"),
        [(x["name"], _word(x["present"]), x["remedy"] if x["present"] else x["how"]) for x in report["limits"] or []],
    )
    _table(
        out,
        "DeepSpeed's ops",
        ("op", "built", "can be built"),
        [(x["name"], x["built"] or "no", _word(x["buildable"])) for x in report["ops"] or [] if not x["placeholder"]],
    )
    _table(
        out,
        "Combinations",
        ("what", "works here", "why"),
        [(x["what"], _word(x["works"]), x["why"]) for x in report["combinations"] or []],
    )
    _table(
        out,
        "Problems",
        ("", "what", "remedy"),
        [("stops" if x["fatal"] else "note", x["what"], x["remedy"]) for x in report["problems"]],
    )
    trial = report["trial"]
    if trial["ok"]:
        result = trial["result"]
        out.print(f"zero3_fast trained one step on {result['accelerator']} in {result['seconds']} s.", markup=False)
    else:
        out.print(f"zero3_fast did not train: {trial['reason']}", markup=False)


def _table(out: Console, title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    filled = list(rows)
    if not filled:
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in filled:
        # As they are: rich takes what stands in brackets for its own marks.
        table.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    out.print(table)


def _word(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value} GiB"
