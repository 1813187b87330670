# SPDX-License-Identifier: Apache-2.0
"""A bucket of gradients for each process group, in the memory of upstream's one.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.ipg_buckets``, ``reduce_independent_p_g_buckets_and_remove_grads``,
``__add_grad_to_ipg_bucket``, ``__reduce_and_partition_ipg_grads``, ``independent_gradient_partition_epilogue`` and
``_pre_step`` (0.19.7, 0.19.8). Upstream has one bucket per dtype, and reduces it whenever the next gradient belongs to
another process group. AutoEP's experts are partitioned over other ranks than all other parameters, and the two
alternate from layer to layer, so nearly every layer costs two reductions. Expires when upstream keeps its buckets by
group.

Two groups share one buffer: one fills it from its beginning, the other from its end, and the fuller of them is reduced
when they meet. That is never more memory than upstream's, and never more reductions.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches

_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class _FromItsEnd:
    """Another bucket's buffer, handed out from its end; ``narrow`` is all that upstream asks of a buffer that it fills.

    Args:
        bucket: The bucket that the buffer belongs to. It may be given another one, or none, between two backwards.
    """

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def narrow(self, dimension: int, start: int, length: int) -> torch.Tensor:
        """As a tensor's, counted from the end."""
        buffer: torch.Tensor = self._bucket.buffer
        return buffer.narrow(dimension, buffer.numel() - start - length, length)


class BucketPerProcessGroup(OptimizerPart):
    """Mixin over a Stage-3 optimizer: gradients of two process groups wait for their reductions side by side."""

    switches: Switches
    ipg_buckets: dict[torch.dtype, Any]
    reduce_bucket_size: int
    # Upstream's bucket of each dtype, and the second one, while a backward is under way.
    _first: dict[torch.dtype, Any] | None = None
    _second: dict[torch.dtype, Any]

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """As upstream's: take a gradient into its bucket, and reduce what has no room.

        Args:
            param: A parameter whose gradient is complete.
        """
        optimizer: Any = self
        # Without reduce_scatter a bucket's buffer is reduced as a whole, in the order in which it was filled.
        if self.switches.bucket_per_process_group and optimizer.reduce_scatter and not optimizer.zenflow:
            self._choose_bucket(param)
        super().reduce_independent_p_g_buckets_and_remove_grads(param)

    def independent_gradient_partition_epilogue(self) -> None:
        """As upstream's, which reduces what is left, for both buckets."""
        self._reduce_second()
        super().independent_gradient_partition_epilogue()

    def _pre_step(self) -> None:
        # A backward that has raised leaves gradients behind, which upstream drops now.
        self._as_upstream_has_them()
        super()._pre_step()

    def _choose_bucket(self, param: Any) -> None:
        """Make the bucket of a parameter's process group upstream's current one, with room for its gradient."""
        optimizer: Any = self
        dtype, group = optimizer.get_param_comm_dtype(param), optimizer._get_param_partition_group(param)
        here = self.ipg_buckets[dtype]
        if here.params and here.process_group != group:
            here = self._other(dtype, here)
            if here.params and here.process_group != group:  # a third group
                here = max(here, self._other(dtype, here), key=lambda bucket: bucket.elements)
                self._reduce(dtype, here)
            self.ipg_buckets[dtype] = here
        if self._first is None:
            return  # one group so far: all is upstream's
        other = self._other(dtype, here)
        size = param.ds_numel
        # A gradient that is larger than the buffer stays where it is.
        while size <= self.reduce_bucket_size < here.elements + other.elements + size:
            self._reduce(dtype, max(here, other, key=lambda bucket: bucket.elements))
        self.ipg_buckets[dtype] = here

    def _other(self, dtype: torch.dtype, bucket: Any) -> Any:
        """The bucket that shares its buffer with a given one."""
        if self._first is None:
            self._first, self._second = dict(self.ipg_buckets), {}
            for each, first in self._first.items():
                second = self._second[each] = type(first)()
                second.buffer = None if first.buffer is None else _FromItsEnd(first)
        return self._second[dtype] if bucket is self._first[dtype] else self._first[dtype]

    def _reduce(self, dtype: torch.dtype, bucket: Any) -> None:
        self.ipg_buckets[dtype] = bucket
        getattr(self, _REDUCE)(dtype)

    def _reduce_second(self) -> None:
        if self._first is not None:
            for dtype, bucket in self._second.items():
                self._reduce(dtype, bucket)
            self._as_upstream_has_them()

    def _as_upstream_has_them(self) -> None:
        """Outside of backward everybody else finds the buckets that upstream has made."""
        if self._first is not None:
            self.ipg_buckets.update(self._first)
            self._first = None
