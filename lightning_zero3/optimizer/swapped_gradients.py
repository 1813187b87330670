# SPDX-License-Identifier: Apache-2.0
"""Gradients that are swapped to files come back whole, wherever in their sub-group they begin.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3._swap_out_offload_fp32_gradients`` (0.19.7, 0.19.8) and
``optimizer_swapper``: its ``is_swappable_tensor``, ``numel_alignment`` and ``_adjust_for_misaligned_lengths``. The last
cuts off the end of a gradient whose length isn't a whole number of blocks, and doesn't look at where it begins. A
gradient is read back into the sub-group's buffer at its own offset, past the page cache (``O_DIRECT``), and the system
refuses an address that isn't a multiple of 512 bytes. The op that reads doesn't look at the refusal, so the step uses
what the buffer held before: mostly the gradient of another sub-group. Here the beginning is cut off too, and stays
in memory as upstream's ends do. Expires when upstream aligns beginnings, or raises where a read fails; until it is
noticed, ours finds nothing to cut.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class SwappedGradients(OptimizerPart):
    """Mixin over a Stage-3 optimizer: cuts gradients where the files' blocks begin, before they are swapped out."""

    switches: Switches
    swap_optimizer: bool
    optimizer_swapper: Any
    _warned_of_swaps = False

    def _swap_out_offload_fp32_gradients(self, gradients: dict[int, Any], offsets: dict[int, Any]) -> None:
        if self.swap_optimizer:
            cut = {i: _at_blocks(self.optimizer_swapper, gradients[i], offsets[i]) for i in gradients}
            if self.switches.align_swapped_gradients:
                gradients = {i: [part for part, _ in parts] for i, parts in cut.items()}
                offsets = {i: [offset for _, offset in parts] for i, parts in cut.items()}
            elif not self._warned_of_swaps and any(len(cut[i]) > len(gradients[i]) for i in cut):
                self._warned_of_swaps = True
                rank_zero_warn(
                    "stock_semantics=True with an optimizer on NVMe: DeepSpeed fails to read some gradients back, and "
                    "updates weights with whatever lies in the buffer. Leave stock_semantics out, or offload to the "
                    "CPU, for right numbers."
                )
        super()._swap_out_offload_fp32_gradients(gradients, offsets)


def _at_blocks(swapper: Any, gradients: list[torch.Tensor], offsets: list[int]) -> list[tuple[torch.Tensor, int]]:
    """A sub-group's gradients with their offsets; those that go to files begin at a block, less what is before."""
    parts: list[tuple[torch.Tensor, int]] = []
    for gradient, offset in zip(gradients, offsets, strict=True):
        before = -offset % swapper.numel_alignment
        if before and swapper.is_swappable_tensor(tensor=gradient):
            # A block is 1 KiB for each thread that reads, what is swappable 1 MiB or more. A view would keep all of it.
            parts.append((gradient.narrow(0, 0, before).clone(), offset))
            parts.append((gradient.narrow(0, before, gradient.numel() - before), offset + before))
        else:
            parts.append((gradient, offset))
    return parts
