# SPDX-License-Identifier: Apache-2.0
"""Linear layers without a look at a function's signature at every call: which layers, and for how long.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.initialize_ds_offload`` and ``destroy``; those of the function itself
stand in ``linear_function.py``. Expires with it.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.switches import Switches


class LeanLinear:
    """Mixin over a Stage-3 optimizer: the model's linear layers get the leaner function while the engine lives."""

    switches: Switches
    _lean_layers: tuple[torch.nn.Module, ...] = ()

    def initialize_ds_offload(self, module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        """As upstream's, which partitions the model."""
        made = super().initialize_ds_offload(module, *arguments, **named)  # type: ignore[misc]
        # DeepCompile notes which parameters are looked up between its graphs.
        compiled = (named.get("ds_config") or {}).get("compile", {}).get("deepcompile", False)
        if self.switches.lean_linear and not compiled:
            from lightning_zero3.optimizer.linear_function import make_lean

            self._lean_layers = tuple(each for each in module.modules() if make_lean(each))
        return made

    def destroy(self) -> None:
        """As upstream's."""
        if self._lean_layers:
            from lightning_zero3.optimizer.linear_function import make_upstreams

            for layer in self._lean_layers:
                make_upstreams(layer)
            self._lean_layers = ()
        super().destroy()  # type: ignore[misc]
