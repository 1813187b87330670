"""The strategy for Trainers of the package ``pytorch_lightning``; importing this module imports that package.

``pytorch_lightning.Trainer(strategy="zero3_fast")`` needs no import from here. With options it is
``from lightning_zero3.pytorch_lightning import Zero3FastStrategy``.
"""

from __future__ import annotations

from pytorch_lightning.strategies import DeepSpeedStrategy

from lightning_zero3 import strategy


class Zero3FastStrategy(strategy.TrainerStrategy, DeepSpeedStrategy):
    """:class:`lightning_zero3.Zero3FastStrategy`, for ``pytorch_lightning``: the same arguments, the same code."""

    upstream = DeepSpeedStrategy
