"""A plan's report as tables for a terminal."""

from __future__ import annotations

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
    return f"{counted['all_reduce']} all-reduces, {counted['all_gather']} all-gathers"
