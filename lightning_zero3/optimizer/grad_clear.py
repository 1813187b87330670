# SPDX-License-Identifier: Apache-2.0
"""The scoped gradient clear: each step visits each parameter once, whatever the number of sub-groups.

Source: the report "_prepare_fp32_grad_for_sub_group clears every parameter's gradient once per sub-group".

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group`` and ``zero_grad``. Up to 0.19.7 the
first calls the second for every sub-group, and the second walks all parameters of all sub-groups. From 0.19.8 on
``step`` calls ``zero_grad`` once before its loop; then nothing here ever runs, and upstream's clear is what is used
(:data:`lightning_zero3.capabilities.fixes.GRAD_CLEAR` tells).
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class ScopedGradClear(OptimizerPart):
    """Mixin over a Stage-3 optimizer: a clear that is called for a sub-group clears that sub-group."""

    switches: Switches
    fp16_groups: list[list[torch.nn.Parameter]]
    # The sub-group that is being prepared, or None outside of the preparation.
    _clear_scope: int | None = None

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        if not self.switches.scoped_grad_clear:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)
            return
        self._clear_scope = sub_group_id
        try:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)
        finally:
            self._clear_scope = None

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """Clear gradients: of the sub-group in preparation, of all parameters at any other time.

        Upstream's own ``zero_grad`` does the work on the narrowed list, so both of its resets (``micro_step_id`` and
        the epilogue flag) and its ``record_stream`` happen as they always do.

        Args:
            set_to_none: As upstream's.
        """
        if self._clear_scope is None:
            return super().zero_grad(set_to_none)
        every_sub_group = self.fp16_groups
        self.fp16_groups = [every_sub_group[self._clear_scope]]
        try:
            return super().zero_grad(set_to_none)
        finally:
            self.fp16_groups = every_sub_group
