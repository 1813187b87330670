"""Every combination of how ZeRO Stage 3 may be run here: the axes, their product, and what is known of each cell."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, fields


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
        return f"ep{self.experts}-tp{self.tensors}-{self.offload}-{self.precision}-{self.checkpointing}-{how}-{self.built}"

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
    return [Cell(*values) for values in itertools.product(*AXES.values())]


@dataclass(frozen=True)
class Refusal:
    """Why cells are refused.

    Args:
        message: A part of the error's text.
        why: For the table.
    """

    message: str
    why: str


OFFLOAD_UNDER_BOTH = Refusal(
    "DeepSpeed offloads under one of the two only",
    "DeepSpeed 0.19.8 refuses offload where expert and tensor parallelism meet",
)
SWAPPED_16_BIT = Refusal(
    "DeepSpeed trains on wrong numbers then",
    "DeepSpeed 0.19.8 computes wrong weights, silently, where 16-bit gradients' optimizer states are swapped to files",
)


def refusal_of(cell: Cell) -> Refusal | None:
    """What the strategy says to a cell that can't be run, or None.

    Args:
        cell: Any.
    """
    if cell.experts > 1 and cell.tensors > 1 and cell.offload != "none":
        return OFFLOAD_UNDER_BOTH
    if cell.offload == "nvme" and cell.precision != "32-true":
        return SWAPPED_16_BIT
    return None
