# SPDX-License-Identifier: Apache-2.0
"""What this rank keeps of a tensor, to be written to: a whole tensor, or a partition and its master."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_zero3.config import SetupError
from lightning_zero3.moe.boxes import strides_of
from lightning_zero3.moe.weight_names import local_shape


class NotWritableError(SetupError):
    """Weights are kept in a way that they can't be written in."""


@dataclass(frozen=True)
class OwnPart:
    """A range of a tensor's flattened elements, as this rank keeps it.

    Args:
        shape: The tensor's shape on this rank, whole.
        start: The range's first element.
        stop: The first one after it.
        kept: 1-d tensors that hold the range from their start on, in one dtype or another.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    kept: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def write(self, values: torch.Tensor, start: Sequence[int]) -> None:
        """Write a box of the tensor, each time in what is kept's own precision.

        Args:
            values: The box's elements, all inside the range.
            start: Where in the tensor the box begins.
        """
        strides = strides_of(self.shape)
        offset = sum(s * stride for s, stride in zip(start, strides, strict=True)) - self.start
        for kept in self.kept:
            kept.as_strided(values.shape, strides, kept.storage_offset() + offset).copy_(values)

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Write all that is kept, padding included.

        Args:
            values: As many elements, 1-d.
        """
        for kept in self.kept:
            kept.copy_(values)


def range_of(tensor: Any) -> OwnPart:
    """Which range of a tensor this rank keeps, without opening it.

    Args:
        tensor: A parameter or buffer; one that ZeRO hasn't partitioned is kept whole.

    Raises:
        NotWritableError: Its partition can't be written to as it is.
    """
    shape = local_shape(tensor)
    numel = torch.Size(shape).numel()
    if not hasattr(tensor, "ds_id"):
        if tensor.is_meta or not tensor.is_contiguous():
            raise NotWritableError(f"A tensor of shape {shape} is {'on meta' if tensor.is_meta else 'not contiguous'}.")
        return OwnPart(shape, 0, numel)
    size = tensor.partition_numel()
    if hasattr(tensor.ds_tensor, "ds_quant_scale") or tensor.ds_tensor.numel() != size:
        raise NotWritableError(
            "Weights that live on NVMe, or are quantized by ZeRO, can't be written to. Load them before that: by "
            "from_pretrained in the LightningModule's __init__."
        )
    start = min(size * torch.distributed.get_rank(group=tensor.ds_process_group), numel)
    return OwnPart(shape, start, min(start + size, numel))


@contextmanager
def own_part(tensor: Any) -> Iterator[OwnPart]:
    """This rank's part of a tensor, open to be written to: the weights, and their master where there is one.

    Upstream symbols: ``ds_tensor``, ``ds_status``, ``ds_secondary_tensor``, ``partition``, ``partition_numel`` and
    ``_z3_optimizer`` of a partitioned parameter (0.19.7, 0.19.8). Reason: a write to weights alone is overwritten from
    the masters by the next step. Expires when upstream can set a partition together with its master.

    Args:
        tensor: A parameter or buffer.

    Raises:
        NotWritableError: As :func:`range_of`.
    """
    part = range_of(tensor)
    if not hasattr(tensor, "ds_id"):
        yield OwnPart(part.shape, part.start, part.stop, (tensor.detach().view(-1),))
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if tensor.ds_status == ZeroParamStatus.AVAILABLE:
        tensor.partition()  # a copy that lies around gathered would be used further
    if getattr(tensor, "ds_secondary_tensor", None) is not None:
        tensor.ds_secondary_tensor = None  # made again from the partition
    weights = tensor.ds_tensor.detach()
    optimizer: Any = getattr(tensor, "_z3_optimizer", None)
    if not hasattr(optimizer, "master_of") or not optimizer.is_optimized(tensor):
        yield OwnPart(part.shape, part.start, part.stop, (weights,))
        return
    with optimizer.master_of(tensor) as master:
        alias = master.data_ptr() == weights.data_ptr()
        yield OwnPart(part.shape, part.start, part.stop, (weights,) if alias else (weights, master))


@torch.no_grad()
def own_values(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor, copied to the host: the master's digits where there is one.

    Nothing is gathered or changed, so it may be called between any two steps.

    Args:
        tensor: A parameter or buffer.

    Returns:
        The elements of :func:`range_of`, 1-d.

    Raises:
        NotWritableError: As :func:`range_of`.
    """
    part = range_of(tensor)
    if not hasattr(tensor, "ds_id"):
        whole: torch.Tensor = tensor.detach().reshape(-1).to("cpu", copy=True)
        return whole
    optimizer: Any = getattr(tensor, "_z3_optimizer", None)
    if hasattr(optimizer, "master_of") and optimizer.is_optimized(tensor):
        with optimizer.master_of(tensor) as master:
            digits: torch.Tensor = master[: part.stop - part.start].to("cpu", copy=True)
        return digits
    weights: torch.Tensor = tensor.ds_tensor.detach()[: part.stop - part.start].to("cpu", copy=True)
    return weights


def require_readable(tensor: Any, *, masters: bool) -> None:
    """Refuse a parameter of which :func:`own_values` doesn't give the digits that are wanted.

    Args:
        tensor: A parameter or buffer.
        masters: Whether the weights' own digits aren't enough.

    Raises:
        SetupError: Its master is wanted, and its engine's optimizer is upstream's own.
    """
    optimizer: Any = getattr(tensor, "_z3_optimizer", None)
    trained = hasattr(tensor, "ds_id") and optimizer is not None and tensor.requires_grad
    if masters and trained and not hasattr(optimizer, "master_of") and tensor.ds_tensor.dtype != torch.float32:
        raise SetupError(
            f"The engine's optimizer is {type(optimizer).__name__}, not zero3_fast's, and its masters can't be reached."
            " Export the weights in 16 bits, or from a checkpoint (lightning-zero3 export)."
        )


def require_masters_in_reach(tensor: Any) -> None:
    """Refuse a parameter whose master :func:`own_part` can't write to.

    Args:
        tensor: A parameter or buffer.

    Raises:
        NotWritableError: Its engine's optimizer is upstream's own.
    """
    optimizer = getattr(tensor, "_z3_optimizer", None)
    if optimizer is not None and not hasattr(optimizer, "master_of"):
        raise NotWritableError(
            f"The engine's optimizer is {type(optimizer).__name__}, not zero3_fast's, and its masters can't be "
            "reached. Load weights before the engine is built: in configure_model."
        )
