# SPDX-License-Identifier: Apache-2.0
"""The strategy for Trainers of the package ``pytorch_lightning``; importing this module imports that package.

``pytorch_lightning.Trainer(strategy="zero3_fast")`` needs no import from here. With options it is
``from lightning_zero3.pytorch_lightning import Zero3FastStrategy``.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning import strategies

from lightning_zero3 import strategy

# The type checker takes the two packages' classes for unrelated ones, which they aren't in what is used of them.
_UPSTREAM: Any = strategies.DeepSpeedStrategy


class Zero3FastStrategy(strategy.TrainerStrategy, _UPSTREAM):  # type: ignore[misc]
    """:class:`lightning_zero3.Zero3FastStrategy`, for ``pytorch_lightning``: the same arguments, the same code."""

    upstream = _UPSTREAM


Zero3FastStrategy.register_strategies(strategies.StrategyRegistry)
