# SPDX-License-Identifier: Apache-2.0
"""Saving where a fit stands and going on there: the Lightning hooks of ``Zero3FastStrategy`` that are about that."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero3.resuming import resumed_fit
from lightning_zero3.resuming.preemption import Preemption
from lightning_zero3.trainer_mixin import TrainerMixin


class ResumingStrategy(TrainerMixin):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: an exact resume; with ``stock_semantics``, with its own."""

    _fit_watch: resumed_fit.FitWatch | None = None
    _preemption: Preemption | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's, with each rank's random states and where the fit stands.

        Args:
            checkpoint: What Lightning saves.
            filepath: Where.
            storage_options: As Lightning's.
        """
        if self._fit_watch is not None and "loops" in checkpoint:
            checkpoint = self._fit_watch.amended(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's, with what :meth:`save_checkpoint` adds.

        Args:
            checkpoint_path: Where.
            weights_only: As Lightning's.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        if self._fit_watch is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            checkpoint = self._fit_watch.resume(checkpoint)
        return checkpoint

    def teardown(self) -> None:
        """As Lightning's; the Trainer's loops get their own methods back."""
        if self._fit_watch is not None:
            self._fit_watch.close()
        if self._preemption is not None:
            self._preemption.close()
        super().teardown()

    def setup(self, trainer: Any) -> None:
        """As Lightning's; signals are noted from now on, and acted upon between steps.

        Args:
            trainer: The Trainer.
        """
        self._fit_watch = self._preemption = None
        super().setup(trainer)
        if self.options.stock_semantics:
            return
        fits = trainer.state.fn == TrainerFn.FITTING
        self._preemption = Preemption(trainer, fits=fits)
        if fits:
            self._fit_watch = resumed_fit.FitWatch(trainer, self._preemption.step_ended)
