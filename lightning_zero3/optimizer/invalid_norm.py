# SPDX-License-Identifier: Apache-2.0
"""A step whose gradient norm is no finite number is skipped, on releases that would apply it.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.step``, ``_overflow_check_and_loss_scale_update`` and
``_get_norm_groups``. Each sub-group's norm is masked to -1 where it isn't finite. Up to 0.19.7 ``step`` squares that to
1 and updates the weights with the NaNs; 0.19.8 takes the step for an overflow
(:data:`lightning_zero3.capabilities.fixes.INVALID_NORM`), and then nothing here runs.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class SkipInvalidNorm(OptimizerPart):
    """Mixin over a Stage-3 optimizer: looks at the norms before the decision to step, and passes them on."""

    switches: Switches
    dtype: torch.dtype
    torch_autocast_gradscaler: Any
    overflow: bool
    _global_grad_norm: Any
    # Norms of the step in progress, computed early and not yet asked for by ``step``.
    _early_norms: list[torch.Tensor] | None = None

    def _overflow_check_and_loss_scale_update(self, *args: Any, **kwargs: Any) -> Any:
        # With torch's GradScaler it is the scaler that skips, and lowers its scale.
        if not self.switches.skip_invalid_norm or self.torch_autocast_gradscaler is not None:
            return super()._overflow_check_and_loss_scale_update(*args, **kwargs)
        # With fp16 upstream checks the gradients themselves and sets this flag anew; otherwise nothing resets it.
        self.overflow = False
        if self.dtype != torch.float16:
            norms = super()._get_norm_groups()
            stacked = torch.stack([torch.as_tensor(norm).to(torch.float64) for norm in norms])
            if bool(((stacked < 0) | ~torch.isfinite(stacked)).any()):
                self.overflow = True
                self._global_grad_norm = float("inf")
            else:
                self._early_norms = norms
        return super()._overflow_check_and_loss_scale_update(*args, **kwargs)

    def _get_norm_groups(self) -> list[torch.Tensor]:
        norms, self._early_norms = self._early_norms, None
        return norms if norms is not None else super()._get_norm_groups()
