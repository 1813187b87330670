# SPDX-License-Identifier: Apache-2.0
"""Where each parameter's partition lies in the flat buffers, and whether given tensors are those places."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class FlatLayout:
    """The order that ``lp_param_buffer`` and ``grad_partitions_flat_buffer`` share: sub-groups, then parameters.

    Args:
        groups: Upstream's ``fp16_groups``: parameters by sub-group, each with ``partition_numel()``.
    """

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        self.numels = [int(parameter.partition_numel()) for group in groups for parameter in group]
        ends = list(itertools.accumulate(self.numels))
        self._starts = [0, *ends[:-1]]
        firsts = list(itertools.accumulate((len(group) for group in groups), initial=0))
        # Per sub-group: its parameters' positions in `numels`, and its place in the buffers, in elements.
        self.parameters = [range(a, b) for a, b in itertools.pairwise(firsts)]
        bounds = [0, *ends]
        self.spans = [(bounds[a], bounds[b]) for a, b in itertools.pairwise(firsts)]
        self._expected: tuple[tuple[int, int], list[int]] = ((0, 0), [])

    def holds(self, buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the tensors are the buffer: every parameter's tensor starts at that parameter's place in it.

        Addresses are compared, not identities, because moving states to the host and back binds the same tensors to
        other memory. It is host work on integers only; nothing waits for a device.

        Args:
            buffer: A flat buffer, 1-D.
            tensors: One tensor per parameter, in this layout's order.
        """
        key = (buffer.data_ptr(), buffer.element_size())
        if self._expected[0] != key:
            self._expected = (key, [key[0] + key[1] * start for start in self._starts])
        return list(map(torch.Tensor.data_ptr, tensors)) == self._expected[1]
