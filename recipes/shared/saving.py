# SPDX-License-Identifier: Apache-2.0
"""Saving while a recipe trains: every N steps, at the end, and when a scheduler is about to take the machine away."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_zero3.config import SetupError
from shared import checkpoints

# EX_TEMPFAIL of sysexits.h: "try again later". A launcher that sees it starts the job again with --resume auto.
STOPPED_BY_SIGNAL = 75
# SLURM's --signal=USR1@SECONDS, and what Kubernetes, SLURM and torchrun send before they kill.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Saving(pl.Callback):
    """Save complete checkpoints, and stop after a signal with one.

    A handler that saves by itself, as Lightning's for SLURM, begins collectives wherever each rank happens to be, in
    the middle of a backward or not. Here it only takes a note. After each optimizer step the ranks ask each other
    whether any has one (a sum of one number), and all save and stop after the same step.

    Args:
        run: The run's folder, on rank 0.
        output: The folder for runs.
        every: Optimizer steps between two checkpoints.
        keep: How many of this training's checkpoints stay.
        made_by: See :func:`shared.checkpoints.identity`.
        resumed: The checkpoint that this run goes on from.
    """

    def __init__(
        self,
        run: Path,
        *,
        output: Path,
        every: int,
        keep: int,
        made_by: dict[str, Any],
        resumed: checkpoints.Checkpoint | None,
    ) -> None:
        self.run = run
        self.output = output
        self.every = every
        self.keep = keep
        self.made_by = made_by
        self.first_run = run.name if resumed is None else resumed.first_run
        self.stopped = False
        self._asked = False
        self._seen = 0
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take note of signals from now on, in place of Lightning's handlers, which have been set by now."""
        self._seen = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """After each optimizer step: save if it is time to."""
        step = trainer.global_step
        if step == self._seen:
            return
        self._seen = step
        self.stopped = trainer.strategy.reduce_boolean_decision(self._asked, all=False)
        if self.stopped or step % self.every == 0 or step == trainer.max_steps:
            self._save(trainer, step)
        if self.stopped:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Give the signals back, before Lightning puts back what was there before it."""
        self._give_back()

    def on_exception(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """The same after an error."""
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked = True

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        path = trainer.strategy.broadcast(checkpoints.folder_of(self.run, step))
        trainer.save_checkpoint(path)

        def mark_and_prune() -> None:
            checkpoints.complete(path, step=step, first_run=self.first_run, made_by=self.made_by)
            checkpoints.prune(self.output, self.first_run, self.keep)

        # With --async_save the path is there at a later step, or when the fit has ended.
        trainer.strategy.after_commit(mark_and_prune)  # type: ignore[attr-defined]
        # Whoever ends before it's marked might have the launcher end rank 0.
        trainer.strategy.barrier("marked as complete")
        for logger in trainer.loggers:
            logger.save()  # what a killed run has measured so far


class SameCheckpoint(pl.Callback):
    """See that all ranks go on from the same checkpoint.

    Each looks for it by itself, before there is a process group. Nodes with folders of their own would find different
    ones.

    Args:
        resumed: What this rank has found.
    """

    def __init__(self, resumed: checkpoints.Checkpoint | None) -> None:
        self.found = "none" if resumed is None else str(resumed.path)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Compare, before anything is loaded.

        Raises:
            SetupError: They differ; on all ranks.
        """
        first = trainer.strategy.broadcast(self.found)
        if trainer.strategy.reduce_boolean_decision(first != self.found, all=False):
            raise SetupError(
                f"--resume: rank 0 has found {first}, rank {trainer.global_rank} {self.found}. All nodes need the "
                "same shared folder as --output; or name the checkpoint by --resume PATH."
            )
