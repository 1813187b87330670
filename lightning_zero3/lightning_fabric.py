# SPDX-License-Identifier: Apache-2.0
"""The strategy for Fabrics of the package ``lightning_fabric``; importing this module imports that package.

``lightning_fabric.Fabric(strategy="zero3_fast")`` needs no import from here. With options it is
``from lightning_zero3.lightning_fabric import Zero3FastFabricStrategy``.
"""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.deepspeed import DeepSpeedStrategy

from lightning_zero3.fabric import strategy


class Zero3FastFabricStrategy(strategy.FabricStrategy, DeepSpeedStrategy):
    """:class:`lightning_zero3.Zero3FastFabricStrategy`, for ``lightning_fabric``: the same arguments, the same code."""

    upstream = DeepSpeedStrategy


Zero3FastFabricStrategy.register_strategies(STRATEGY_REGISTRY)
