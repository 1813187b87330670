# SPDX-License-Identifier: Apache-2.0
"""Under torch autocast to fp16, a step that overflows lowers the scale.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3._overflow_clean_up`` and ``torch_autocast_gradscaler`` (0.19.8).
Upstream skips a step whose norm isn't finite before its GradScaler hears of it, and only the scaler lowers the scale:
all later steps overflow as well. 0.19.7 leaves the skipping to the scaler. Detected by
:data:`lightning_zero3.capabilities.fixes.SCALER_BACKS_OFF`. Expires when upstream tells its scaler.
"""

from __future__ import annotations

from typing import Any

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class ScalerBacksOff(OptimizerPart):
    """Mixin over a Stage-3 optimizer: lowers its GradScaler's scale where upstream skips a step without it."""

    switches: Switches
    torch_autocast_gradscaler: Any

    def _overflow_clean_up(self, *arguments: Any) -> None:
        super()._overflow_clean_up(*arguments)
        scaler = self.torch_autocast_gradscaler
        if scaler is not None and self.switches.lower_the_scale:
            # What the scaler's own update does where it has found an overflow.
            lower = scaler.get_scale() * scaler.get_backoff_factor()
            scaler.load_state_dict({**scaler.state_dict(), "scale": lower, "_growth_tracker": 0})
