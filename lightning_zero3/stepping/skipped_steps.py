# SPDX-License-Identifier: Apache-2.0
"""A step that the engine skips is no step: ``global_step`` and schedulers stay, and the user is told.

Upstream symbols: ``DeepSpeedEngine.was_step_applied`` (0.19.7, 0.19.8); ``_OptimizationProgress``,
``_ManualOptimization.optim_step_progress`` and ``_TrainingEpochLoop.update_lr_schedulers`` (Lightning 2.6.6), which
count a step once it was asked for. Replaced on one Trainer's loops for the length of a fit. Detected by tests. Expires
when Lightning asks the strategy whether a step was taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.substitution import substituted

# More than a loss scale of 2^32 needs to come down to 1 with a hysteresis of 2. A run of which nothing but max_steps
# would be the end never ends otherwise.
SKIPPED_IN_A_ROW_AT_MOST = 100


class EndlessSkippingError(RuntimeError):
    """No optimizer step could be taken for so long that none is to be expected any more."""


class SkippedSteps:
    """Watches the steps of one fit.

    Args:
        trainer: The Trainer.
        engine: Its DeepSpeed engine.
    """

    def __init__(self, trainer: Any, engine: Any) -> None:
        self._trainer = trainer
        self._engine = engine
        self._skipped = False
        self._in_a_row = 0
        self._replaced = ExitStack()
        loop = trainer.fit_loop.epoch_loop
        for progress in (
            loop.automatic_optimization.optim_progress.optimizer.step,
            loop.manual_optimization.optim_step_progress,
        ):
            self._replace(progress, "increment_completed", partial(self._count_step, progress))
        self._replace(loop, "update_lr_schedulers", self._update_schedulers)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._replaced.enter_context(substituted(owner, name, partial(replacement, getattr(owner, name))))

    @property
    def last_was_skipped(self) -> bool:
        """Whether the last optimizer step of this batch was skipped."""
        return self._skipped

    def close(self) -> None:
        """Give the loops back their own methods."""
        self._replaced.close()

    def batch_starts(self) -> None:
        """What was skipped was another batch's step."""
        self._skipped = False

    def step_ended(self) -> None:
        """After ``engine.step`` of a step's last micro-batch.

        Raises:
            EndlessSkippingError: Too many steps in a row were skipped.
        """
        self._skipped = not self._engine.was_step_applied()
        self._in_a_row = self._in_a_row + 1 if self._skipped else 0
        if not self._skipped:
            return
        trainer = self._trainer
        where = f"Optimizer step {trainer.global_step + 1} (epoch {trainer.current_epoch}, batch {self._batch_idx()})"
        rank_zero_warn(
            f"{where} was skipped: a gradient is infinite or no number. Weights, learning rates and global_step stay "
            "as they are."
        )
        if self._in_a_row >= SKIPPED_IN_A_ROW_AT_MOST:
            raise EndlessSkippingError(
                f"{where} is number {self._in_a_row} in a row that was skipped for a gradient that is infinite or no "
                "number, so this run would never end by max_steps. Look at the loss and the data of these batches, or "
                "at the weights, for values that aren't finite (Trainer(detect_anomaly=True) names the operation)."
            )

    def _batch_idx(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_idx)

    def _count_step(self, progress: Any, count: Callable[[], None]) -> None:
        if self._skipped:
            progress.total.ready -= 1
            progress.current.ready -= 1
        else:
            count()

    def _update_schedulers(self, update: Callable[..., None], interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not self._skipped:
            update(interval, update_plateau_schedulers=update_plateau_schedulers)
