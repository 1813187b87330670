# SPDX-License-Identifier: Apache-2.0
"""A plan's report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report.

    Args:
        report: See :func:`lightning_zero3.plan.report.assemble`.
        console: Where to; standard output if None.
    """
    out = console or Console()
    setup = report["setup"]
    out.print(f"[bold]{report['title']}[/bold] with zero3_fast, DeepSpeed {report['deepspeed']}", highlight=False)
    dtypes = report["dtypes"]
    masters = "masters are the weights themselves" if report["aliased"] else f"masters {dtypes['masters']}"
    out.print(
        f"{setup['nodes']} × {setup['devices']} = {report['world_size']} ranks, expert parallel "
        f"{setup['expert_parallel_size'] or 'off'}, tensor parallel {setup['tensor_parallel_size']}; weights "
        f"{dtypes['weights']}, {masters}, moments {dtypes['states']}, gradients {dtypes['gradients']}",
        highlight=False,
    )
    sizes = _table("What one rank holds", "", "tensors", "elements on this rank", "shared by ranks")
    for kind in report["kinds"]:
        sizes.add_row(kind["kind"], *map(_number, (kind["parameters"], kind["elements_per_rank"], kind["group_size"])))
    tensors = sum(kind["parameters"] for kind in report["kinds"])
    sizes.add_row("all", _number(tensors), _number(report["elements_per_rank"]), "")
    out.print(sizes)
    out.print(f"The whole model has {report['model_parameters']:,} parameters.", highlight=False)
    out.print(_steps(report))
    _explain(report, out)
    if report["memory_gib"]:
        out.print(_memory(report))
        _fits(report, out)
    if "bytes_sent_per_step" in report:
        out.print(_sent(report))
        out.print(_bounds(report))
        out.print("Bounds are at the vendor's peak rates: no run is faster, and none reaches them.", highlight=False)


def _memory(report: dict[str, Any]) -> Table:
    memory = report["memory_gib"]
    table = _table("Memory of one rank, GiB", "", "zero3_fast", "stock DeepSpeed")
    for part, size in memory["parts"].items():
        table.add_row(part, *(2 * (f"{size:.2f}",)))
    table.add_row("a second copy of the weights", "", f"{memory['second_copy']:.2f}")
    both = [(memory[f"{whose}between_steps"], memory[f"{whose}peak"]) for whose in ("", "stock_")]
    table.add_row("held between steps", *(f"{held:.2f}" for held, _ in both), style="bold")
    table.add_row("forward and backward need more", *(2 * (f"{memory['forward_backward']['bytes']:.2f}",)))
    for kind, size in memory["forward_backward"]["by_kind"].items():
        table.add_row(f"  {kind}", *(2 * (f"{size:.2f}",)))
    table.add_row("a step needs more", *(f"{memory[name]['bytes']:.2f}" for name in ("step", "stock_step")))
    table.add_row("peak", *(f"{peak:.2f}" for _, peak in both), style="bold")
    table.add_row("context, NCCL, fragments (an estimate)", f"{memory['allowance_estimated']:.2f}", "")
    for part, size in memory["host"].items():
        table.add_row(f"on the host: {part}", *(2 * (f"{size:.2f}",)))
    for how, size in memory["activations"].items():
        table.add_row(f"most of activations, {how}", *(2 * (f"{size:.2f}",)))
    for tiles, size in memory["logits"].items():
        table.add_row(f"most of logits, {tiles} tile{'s' * (tiles != '1')}", *(2 * (f"{size:.2f}",)))
    return table


def _fits(report: dict[str, Any], out: Console) -> None:
    total, gpu = report["memory_gib"]["total"], report["gpu"]
    room = report["gpu_gib"] - total
    said = f"leaves {room:.1f} GiB" if report["fits"] else f"doesn't fit, by {-room:.1f} GiB"
    out.print(f"{total:.1f} GiB of the {report['gpu_gib']} of an {gpu}: {said}.", highlight=False)
    if "longest_sequence_length" in report:
        out.print(_longest(report["longest_sequence_length"], report["memory_by_sequence_length"]), highlight=False)


def _longest(longest: int | None, tried: Mapping[str, float]) -> str:
    """What was found; at either end of what was tried it is no bound.

    >>> _longest(1024, {"1024": 1.0}), _longest(None, {"1024": 1.0})
    ('All that was tried fits, up to 1,024 tokens.', "The shortest that was tried, 1,024 tokens, doesn't fit.")
    """
    lengths = sorted(map(int, tried))
    if longest is None:
        return f"The shortest that was tried, {lengths[0]:,} tokens, doesn't fit."
    if longest == lengths[-1]:
        return f"All that was tried fits, up to {longest:,} tokens."
    return f"The longest that fits: {longest:,} tokens."


def _sent(report: dict[str, Any]) -> Table:
    table = _table("What a rank sends in a step", "", "collective", "among ranks", "GiB")
    for message in report["bytes_sent_per_step"]:
        size = message["sent_bytes"] / 2**30
        table.add_row(message["what"], message["kind"], _number(message["group_size"]), f"{size:.3f}")
    if report["bytes_to_or_from_host_per_step"]:
        table.add_row("to or from the host", "", "", f"{report['bytes_to_or_from_host_per_step'] / 2**30:.3f}")
    return table


_HEADINGS = {"optimizer": "update"}  # the word is too long for 80 columns
_PARTS = ("optimizer", "compute", "node_links", "network", "host_link", "with_overlap", "without_overlap")


def _bounds(report: dict[str, Any]) -> Table:
    table = _table("Least times of a step, ms", "", *(_HEADINGS.get(part, part.replace("_", " ")) for part in _PARTS))
    for gpu, bounds in report["lower_bounds_seconds"].items():
        table.add_row(gpu, *(f"{1000 * bounds[part]:,.1f}" for part in _PARTS))
    return table


def show_sweep(found: dict[str, Any], console: Console | None = None) -> None:
    """Print what a sweep has found.

    Args:
        found: See :func:`lightning_zero3.plan.sweep.swept`.
        console: Where to; standard output if None.
    """
    out = console or Console()
    setup = found["setup"]
    out.print(
        f"[bold]{found['title']}[/bold], {setup['nodes']} × {setup['devices']} {found['gpu']} "
        f"({found['gpu_gib']} GiB), {setup['sequence_length']:,} tokens × {setup['micro_batch_size']}",
        highlight=False,
    )
    table = _table(
        "What fits; times are lower bounds",
        "EP",
        "TP",
        "precision",
        "offload",
        "ms/step",
        "tokens/step",
        "s/M tokens",
        "GiB",
        "host GiB",
    )
    for row in found["combinations"]:
        table.add_row(
            *combination(row),
            f"{1000 * row['seconds_per_step']:,.0f}",
            _number(row["tokens_per_step"]),
            f"{row['seconds_per_million_tokens']:.2f}",
            f"{row['total_gib']:.1f}",
            f"{row['host_gib']:.1f}",
        )
    out.print(table)
    refused = _table("What doesn't", "EP", "TP", "precision", "offload", "why")
    for row in found["impossible"]:
        refused.add_row(*combination(row), row["reason"])
    if found["impossible"]:
        out.print(refused)


def combination(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """A sweep's combination in a few words.

    Args:
        row: One of a sweep's.

    >>> combination({"expert_parallel_size": 8, "tensor_parallel_size": 1, "precision": "bf16-mixed",
    ...     "bf16_masters": True, "offload_optimizer": True, "offload_parameters": False})
    ('8', '1', 'bf16, bf16 masters', 'optimizer')
    """
    precision = "fp32" if row["precision"] == "32-true" else "bf16"
    masters = ", bf16 masters" if row["bf16_masters"] else ""
    moved = [name for name in ("optimizer", "parameters") if row[f"offload_{name}"]]
    experts = row["expert_parallel_size"]
    return (str(experts or "off"), str(row["tensor_parallel_size"]), precision + masters, ", ".join(moved) or "none")


def _steps(report: dict[str, Any]) -> Table:
    other = report.get("as_deepspeed_is")
    columns = ["this plan", *(["with AutoEP's own cap"] if other else [])]
    table = _table("An optimizer step", "", *columns)
    for label, name in (
        ("sub-groups", "sub_groups"),
        ("parameter tensors", "parameters"),
        ("the optimizer's own groups", "optimizer_groups"),
        ("elements of the largest sub-group", "largest_sub_group"),
        ("visits to clear gradients: one clear per sub-group", "gradient_clear_visits_per_sub_group"),
        ("  the installed DeepSpeed", "gradient_clear_visits_stock"),
        ("  zero3_fast", "gradient_clear_visits_ours"),
    ):
        table.add_row(label, *(_number(counts[name]) for counts in (report, other) if counts))
    for label, whose in (("collectives: stock", "stock"), ("  zero3_fast", "ours")):
        table.add_row(label, *(_collectives(c["collectives_per_step"][whose]) for c in (report, other) if c))
    return table


def _explain(report: dict[str, Any], out: Console) -> None:
    if report["aliased"]:
        out.print(
            f"Stock DeepSpeed keeps a second copy of the weights as masters: {report['second_copy_gib']:.2f} GiB per "
            "GPU, which zero3_fast saves.",
            highlight=False,
        )
    for topic, text in report.get("max_group_size_means", {}).items():
        out.print(f"{topic.replace('_', ' ').capitalize()}: {text}", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _number(value: int) -> str:
    return f"{value:,}"


def _collectives(counted: dict[str, int]) -> str:
    """How many collectives of each kind.

    >>> _collectives({"all_reduce": 4, "all_gather": 1})
    '4 all-reduces, 1 all-gather'
    """
    counts = ((counted["all_reduce"], "all-reduce"), (counted["all_gather"], "all-gather"))
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in counts)
