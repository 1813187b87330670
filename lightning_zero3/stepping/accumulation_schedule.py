# SPDX-License-Identifier: Apache-2.0
"""Lightning's ``GradientAccumulationScheduler`` with this strategy.

Upstream symbol: ``GradientAccumulationScheduler.on_train_start`` (Lightning 2.6.6), which refuses every
``DeepSpeedStrategy``, because stock's engine counts micro-batches by a number from its config. Ours is told by
Lightning's loop. Its other checks stay. Expires when the callback asks the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_zero3.lightning_packages import package_of
from lightning_zero3.substitution import substituted


class _OfNoStrategy:
    """A class that no strategy is an instance of."""


def allow_schedules(trainer: Any) -> list[tuple[Any, Callable[..., None]]]:
    """What ``on_train_start`` of each schedule among a Trainer's callbacks is to be.

    Args:
        trainer: The Trainer.

    Returns:
        Pairs of a callback and its ``on_train_start`` for this fit.
    """
    kind = package_of(trainer).callbacks.GradientAccumulationScheduler
    schedules = [c for c in trainer.callbacks if isinstance(c, kind)]
    return [(schedule, partial(_start, schedule, schedule.on_train_start)) for schedule in schedules]


def _start(schedule: Any, check: Callable[..., None], trainer: Any, pl_module: Any) -> None:
    with substituted(package_of(trainer).strategies, "DeepSpeedStrategy", _OfNoStrategy):
        check(trainer, pl_module)
    # A resume in the middle of an epoch calls no on_train_epoch_start, which sets this.
    trainer.accumulate_grad_batches = schedule.get_accumulate_grad_batches(trainer.current_epoch)
