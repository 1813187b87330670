# SPDX-License-Identifier: Apache-2.0
"""Every combination of how ZeRO Stage 3 may be run here: the axes, their product, and what is known of each cell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Cell:
    """One combination.

    Args:
        experts: ``expert_parallel_size``; 1 stands for no expert parallelism.
        tensors: ``tensor_parallel_size``; 1 stands for no tensor parallelism.
        offload: What is kept off the device.
        precision: The Trainer's precision, or ``autocast``: ``32-true`` with DeepSpeed's ``torch_autocast``.
        checkpointing: Activation checkpointing, as Transformers' ``gradient_checkpointing_enable`` does it.
        compiled: ``torch.compile``, in place (``self.model.compile()``).
        built: Where the model is built: in ``configure_model``, under ``zero.Init``; or whole, before fit.
    """

    experts: int
    tensors: int
    offload: str
    precision: str
    checkpointing: str
    compiled: bool
    built: str

    @property
    def name(self) -> str:
        """What tests and tables call it.

        >>> Cell(2, 1, "nvme", "32-true", "reentrant", True, "whole").name
        'ep2-tp1-nvme-32-true-reentrant-compiled-whole'
        """
        how = "compiled" if self.compiled else "eager"
        return (
            f"ep{self.experts}-tp{self.tensors}-{self.offload}-{self.precision}-{self.checkpointing}-{how}-{self.built}"
        )

    @property
    def world_size(self) -> int:
        """Ranks of its test: 2, so that all is partitioned; 4 where two kinds of groups are to differ."""
        return max(2, self.experts * self.tensors)


AXES: dict[str, tuple[object, ...]] = {
    "experts": (1, 2),
    "tensors": (1, 2),
    "offload": ("none", "optimizer", "parameters", "nvme"),
    "precision": ("32-true", "bf16-mixed", "bf16-true", "autocast"),
    "checkpointing": ("none", "reentrant", "non-reentrant"),
    "compiled": (False, True),
    "built": ("configure_model", "whole"),
}


def cells() -> list[Cell]:
    """The whole product."""
    product: Iterable[Any] = itertools.product(*AXES.values())
    return [Cell(*values) for values in product]


@dataclass(frozen=True)
class Refusal:
    """Why cells are refused.

    Args:
        message: A part of the error's text.
        why: For the table.
    """

    message: str
    why: str


@dataclass(frozen=True)
class Status:
    """What is known of a cell.

    Args:
        kind: ``tested``: the test has passed on this very cell; ``refused``: by the product, before any process group;
            ``untested``: nobody has seen it pass.
        evidence: The test with its parameter, where tested or refused.
        reason: Why refused or untested.
    """

    kind: Literal["tested", "refused", "untested"]
    evidence: str = ""
    reason: str = ""


OFFLOAD_UNDER_BOTH = Refusal(
    "DeepSpeed offloads under one of the two only",
    "DeepSpeed 0.19.8 has no offload where expert and tensor parallelism meet",
)
NOT_RUN = "the slow suite has the cell, and no run of it is recorded yet (docs/experiments.md)"
_FILE = "tests/distributed/test_grid.py"
TEST = f"{_FILE}::test_a_cell_trains_as_plain_transformers_do"
REFUSAL_TEST = f"{_FILE}::test_a_refused_cell_says_so_before_any_process_group"


def refusal_of(cell: Cell) -> Refusal | None:
    """What the strategy says to a cell that can't be run, or None.

    Args:
        cell: Any.
    """
    if cell.experts > 1 and cell.tensors > 1 and cell.offload != "none":
        return OFFLOAD_UNDER_BOTH
    return None


def status_of(cell: Cell) -> Status:
    """Whether a cell is tested, refused or untested, with the evidence.

    Args:
        cell: Any.

    >>> status_of(Cell(2, 1, "parameters", "bf16-mixed", "none", False, "whole")).kind
    'tested'
    >>> status_of(Cell(2, 2, "optimizer", "32-true", "none", False, "whole")).reason
    'DeepSpeed 0.19.8 has no offload where expert and tensor parallelism meet'
    """
    refusal = refusal_of(cell)
    if refusal is not None:
        return Status("refused", f"{REFUSAL_TEST}[{cell.name}]", refusal.why)
    if cell.name not in passed():
        return Status("untested", reason=NOT_RUN)
    return Status("tested", f"{TEST}[{cell.name}]")


@cache
def passed() -> frozenset[str]:
    """Names of the cells whose test has passed: a line each in ``grid_passed.txt``, by ``docs/record_grid.py``."""
    return frozenset(Path(__file__).with_name("grid_passed.txt").read_text().split())


_MARKS = {"tested": "✓", "refused": "✗", "untested": "–"}


def markdown() -> str:
    """The grid as a part of a page: a table for each expert and tensor parallel size."""
    every = {cell: status_of(cell) for cell in cells()}
    kinds = [status.kind for status in every.values()]
    reasons = sorted({(status.kind, status.reason) for status in every.values() if status.reason})
    lines = [
        "## The grid",
        "",
        f"{len(every)} cells: {kinds.count('tested')} tested, {kinds.count('refused')} refused, "
        f"{kinds.count('untested')} untested; on CPUs with gloo, nothing on CUDA. A tiny Qwen3-MoE is trained for "
        "three steps through a Trainer; losses, gradient norms and every weight are compared with plain Transformers "
        "in one process. 2 ranks, and 4 where expert and tensor parallelism meet.",
        "",
        f"- ✓ tested: `{TEST}[NAME]`, with NAME as in `{next(iter(every)).name}`. By default a set of cells in which "
        'every pair of settings occurs; all of them by `-m "slow or not slow"`.',
        *(f"- {_MARKS[kind]} {kind}: {reason}." for kind, reason in reasons),
        "- Columns: activation checkpointing none, reentrant (re) or not (non); `+c` compiled in place; init: built in "
        "`configure_model`, under `zero.Init`; whole: built before fit.",
        "- Compiled: graphs are traced and run as they are (backend `eager`); `test_code_that_is_really_compiled` has "
        "`aot_eager` and `inductor`, in the slow suite. AutoEP's layers, and what is inside a checkpointed layer, run "
        "uncompiled.",
        "- Offload: the optimizer on the CPU; parameters too; or both in files (nvme). autocast: `32-true` with "
        "DeepSpeed's `torch_autocast` to bf16.",
    ]
    columns: list[Any] = list(itertools.product(*(AXES[axis] for axis in ("built", "compiled", "checkpointing"))))
    short = {"none": "none", "reentrant": "re", "non-reentrant": "non", "configure_model": "init", "whole": "whole"}
    heads = [f"{short[str(b)]} {short[str(k)]}{'+c' if c else ''}" for b, c, k in columns]
    for experts, tensors in itertools.product(AXES["experts"], AXES["tensors"]):
        lines += [
            "",
            f"### Expert parallelism {'none' if experts == 1 else experts}, tensor parallelism "
            f"{'none' if tensors == 1 else tensors}",
            "",
            f"| precision, offload | {' | '.join(heads)} |",
            f"|---|{'---|' * len(heads)}",
        ]
        for precision, offload in itertools.product(AXES["precision"], AXES["offload"]):
            row = {
                (cell.built, cell.compiled, cell.checkpointing): _MARKS[status.kind]
                for cell, status in every.items()
                if (cell.experts, cell.tensors, cell.precision, cell.offload) == (experts, tensors, precision, offload)
            }
            lines.append(f"| {precision}, {offload} | {' | '.join(row[column] for column in columns)} |")
    return "\n".join(lines) + "\n"
