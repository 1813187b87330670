# SPDX-License-Identifier: Apache-2.0
"""Hooks around every module's forward and backward that do what they are there for, and no more.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.initialize_ds_offload`` and ``DeepSpeedZeRoOffload`` (its hooks, see
``lean_offload.py``) (0.19.7, 0.19.8). Upstream puts four hooks and two autograd functions around each module, those
without parameters too, each inside of wrappers. Expires when upstream's hooks cost a third of what they do.
"""

from __future__ import annotations

from typing import Any

from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted


class LeanHooks:
    """Mixin over a Stage-3 optimizer: hooks of :mod:`lightning_zero3.optimizer.lean_offload`."""

    switches: Switches

    def initialize_ds_offload(self, *arguments: Any, **named: Any) -> Any:
        """As upstream's, which registers the hooks."""
        # ZenFlow transposes weights in upstream's hooks, at each module.
        if not self.switches.lean_hooks or getattr(self, "zenflow", False):
            return super().initialize_ds_offload(*arguments, **named)  # type: ignore[misc]
        from deepspeed.runtime.zero import stage3

        from lightning_zero3.optimizer.lean_offload import LeanOffload

        with substituted(stage3, "DeepSpeedZeRoOffload", LeanOffload):
            return super().initialize_ds_offload(*arguments, **named)  # type: ignore[misc]
