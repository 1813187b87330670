# SPDX-License-Identifier: Apache-2.0
"""How much memory a step may use beyond what is live between steps, and where it may come from.

Stock's step already reaches a peak: the copy of the largest sub-group's gradients in the masters' dtype, the
optimizer's working memory for it, and the largest parameter's gradient in fp64 for the norm. Merged work must stay at
or below that peak. Most of what it needs comes from memory that is idle: the reduction bucket, which is empty from the
end of backward's epilogue to the next backward.

Upstream symbols: ``ipg_buckets``, ``IPGBucketZ3.buffer`` and ``elements`` (0.19.7, 0.19.8).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_FP64_BYTES = 8


@dataclass(frozen=True)
class WorkingMemory:
    """What an optimizer allocates while it updates, in copies of the tensor's size.

    Args:
        per_call: Copies of everything that one call updates (foreach implementations).
        per_tensor: Copies of the one tensor that is being updated (loops).
    """

    per_call: int = 0
    per_tensor: int = 0


def idle_bytes(optimizer: Any) -> torch.Tensor | None:
    """The largest reduction bucket as bytes, or None where there is none or gradients wait in it.

    Its content is undefined between steps: the next backward writes before it reads, on a stream that waits for ours.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer_Stage3``.

    Returns:
        A view of the bucket, 1-D, uint8.
    """
    buckets = [bucket for bucket in getattr(optimizer, "ipg_buckets", {}).values() if bucket.buffer is not None]
    if not buckets or any(bucket.elements for bucket in buckets):
        return None
    largest: torch.Tensor = max((bucket.buffer for bucket in buckets), key=torch.Tensor.numel)
    return largest.view(torch.uint8)


class Scratch:
    """A byte range handed out as tensors: idle memory where it suffices, else memory of its own for one phase.

    Args:
        idle: See :func:`idle_bytes`.
        wanted: Bytes needed.
        device: Where to allocate otherwise.
    """

    def __init__(self, idle: torch.Tensor | None, wanted: int, device: torch.device) -> None:
        fits = idle is not None and idle.numel() >= wanted and idle.device == device
        self._bytes = idle if fits else torch.empty(wanted, dtype=torch.uint8, device=device)
        self._used = 0

    @property
    def left(self) -> int:
        """Bytes that can still be taken, wherever they are: idle memory may be more than was wanted."""
        assert self._bytes is not None
        return self._bytes.numel() - self._used

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """What is taken inside is free again afterwards."""
        before = self._used
        try:
            yield
        finally:
            self._used = before

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next elements, uninitialised.

        Args:
            numel: How many.
            dtype: Of what.
        """
        assert self._bytes is not None
        self._used += -self._used % dtype.itemsize
        taken = self._bytes.narrow(0, self._used, numel * dtype.itemsize).view(dtype)
        self._used += numel * dtype.itemsize
        return taken


def stock_peak(optimizer: Any, working: Callable[[int], WorkingMemory]) -> int:
    """Bytes that stock's step has live at its peak, beyond what is live before; a lower bound.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer_Stage3`` without offload.
        working: Sub-group → what the optimizer allocates for it.
    """
    masters = optimizer.fp32_partitioned_groups_flat
    gradient = optimizer.grad_partitions_flat_buffer.dtype
    peak = 0
    for index, (group, master) in enumerate(zip(optimizer.fp16_groups, masters, strict=True)):
        numel, size = master.numel(), master.element_size()
        flattened = numel * gradient.itemsize if len(group) > 1 else 0  # one tensor is flattened to itself
        cast = numel * size if gradient != master.dtype else 0
        needs = working(index)
        update = numel * size * (needs.per_call + needs.per_tensor)
        norm = _FP64_BYTES * max(int(parameter.partition_numel()) for parameter in group)
        # The flattened gradients live until they are cast; without a cast they are what is updated with.
        peak = max(peak, flattened + cast, (cast or flattened) + update, norm)
    return peak
