"""Hooks around every module's forward and backward that do what they are there for, and no more.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.initialize_ds_offload``, ``DeepSpeedZeRoOffload`` (its hooks, see
``lean_offload.py``) and ``get_accelerator().device_count`` in ``__avg_scatter_grads`` (0.19.7, 0.19.8). Upstream puts
four hooks and two autograd functions around each module, those without parameters too, each inside of wrappers; and on
CPUs every reduction starts a process that counts NUMA nodes, for a number that only quantized gradients need. Expires
when upstream's hooks cost a third of what they do.
"""

from __future__ import annotations

from typing import Any

from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted


class LeanHooks:
    """Mixin over a Stage-3 optimizer: hooks of :mod:`lightning_zero3.optimizer.lean_offload`, devices counted once."""

    switches: Switches
    _devices: int | None = None

    def initialize_ds_offload(self, *arguments: Any, **named: Any) -> Any:
        """As upstream's, which registers the hooks."""
        if not self.switches.lean_hooks:
            return super().initialize_ds_offload(*arguments, **named)  # type: ignore[misc]
        from deepspeed.runtime.zero import stage3

        from lightning_zero3.optimizer.lean_offload import LeanOffload

        with substituted(stage3, "DeepSpeedZeRoOffload", LeanOffload):
            return super().initialize_ds_offload(*arguments, **named)  # type: ignore[misc]

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, *arguments: Any) -> Any:
        upstream = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads  # type: ignore[misc]
        if not self.switches.lean_hooks:
            return upstream(*arguments)
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if self._devices is None:
            self._devices = accelerator.device_count()
        with substituted(accelerator, "device_count", lambda: self._devices):
            return upstream(*arguments)
