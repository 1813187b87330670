# SPDX-License-Identifier: Apache-2.0
"""A signal to stop: all ranks save after the same optimizer step, and end with a status that says "try again".

Lightning's handlers save, and broadcast, from inside the handler: collectives begin in the middle of whatever each rank
is doing, and the ranks wait for each other until they are killed. Here a handler takes a note. After each optimizer
step the ranks tell each other the largest note, by one all-reduce of one number. It takes the place of the broadcast
that Lightning does before each micro-batch, so there are as many collectives as before, or fewer.

Upstream symbols: ``_SignalConnector._sigterm_notifier_fn`` and ``_slurm_sigusr_handler_fn``,
``_TrainingEpochLoop._broadcast_sigterm_tensor`` (replaced on one Trainer), ``_CheckpointConnector.hpc_save_path``,
``SIGTERMException`` (Lightning 2.6.6). Detected by tests with real signals. Expires when Lightning agrees over ranks
before it saves.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.substitution import substituted

# EX_TEMPFAIL of sysexits.h: "try again later". The recipes' too.
SAVED_STATUS = 75
# What a shell says of a process that SIGTERM has ended.
ENDED_STATUS = 128 + signal.SIGTERM
# Notes, the larger ones overrule.
_NOTHING, _STOP, _REQUEUE = 0, 1, 2


class StoppedBySignalError(SIGTERMException):
    """A fit was stopped by a signal. A ``SystemExit``, so a script that doesn't catch it ends with its status."""


class Preemption:
    """Watches for signals during one run of a Trainer.

    Args:
        trainer: The Trainer, set up.
        fits: Whether it fits; else there is nothing to save, and a rank ends by itself between two batches.
    """

    def __init__(self, trainer: Any, *, fits: bool) -> None:
        self._trainer = trainer
        self._fits = fits
        self._noted = _NOTHING
        self._replaced = ExitStack()
        connector = trainer._signal_connector
        self._replace(connector, "_sigterm_notifier_fn", self._note_stop)
        self._replace(connector, "_slurm_sigusr_handler_fn", self._note_requeue)
        if fits:
            self._replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._replaced.enter_context(substituted(owner, name, replacement))

    def close(self) -> None:
        """Give the Trainer back its own methods."""
        self._replaced.close()

    def _note_stop(self, number: int, _: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and self._noted == _NOTHING:
            launcher.kill(number)  # the processes that this one has started
        self._noted = max(self._noted, _STOP)
        if not self._fits:
            self._trainer._signal_connector.received_sigterm = True

    def _note_requeue(self, number: int, _: Any) -> None:  # noqa: ARG002
        self._noted = _REQUEUE

    def step_ended(self) -> None:
        """Where every rank is between two optimizer steps: save and stop, if any rank has been told to.

        Raises:
            StoppedBySignalError: A rank has been told to; on all ranks.
        """
        note = self._largest_note()
        if note == _NOTHING:
            return
        trainer = self._trainer
        if not self._saves():
            rank_zero_warn(
                f"Stopped by SIGTERM after step {trainer.global_step}. Nothing was saved: this Trainer has no "
                "ModelCheckpoint and doesn't run under SLURM."
            )
            raise StoppedBySignalError(ENDED_STATUS)
        for logger in trainer.loggers:
            logger.save()
        path = self._save()
        whoever = "this job's next start" if self._slurm() else 'fit(ckpt_path="hpc")'
        again = f"{whoever} goes on from there"
        if note == _REQUEUE:
            again = self._requeued()
        rank_zero_warn(f"Stopped by a signal after step {trainer.global_step} and saved {path}: {again}.")
        trainer.strategy.barrier("stopped by a signal")  # the first that ends has others ended by the launcher
        raise StoppedBySignalError(SAVED_STATUS)

    def _largest_note(self) -> int:
        if self._trainer.world_size == 1:
            return self._noted
        note = torch.tensor(self._noted, device=self._trainer.strategy.root_device)
        torch.distributed.all_reduce(note, torch.distributed.ReduceOp.MAX)
        return int(note.item())

    def _slurm(self) -> bool:
        # By name: pytorch_lightning has a class of its own.
        environment = type(self._trainer._accelerator_connector.cluster_environment)
        return any(kind.__name__ == "SLURMEnvironment" for kind in environment.__mro__)

    def _saves(self) -> bool:
        # Whoever has switched checkpoints off doesn't expect one.
        return bool(self._trainer.checkpoint_callbacks) or self._slurm()

    def _save(self) -> Path:
        """Save where Lightning looks after a requeue; it takes the largest number, and ours are complete."""
        trainer = self._trainer
        root = trainer.default_root_dir
        path = Path(trainer.strategy.broadcast(trainer._checkpoint_connector.hpc_save_path(root)))
        trainer.save_checkpoint(path)
        return path

    def _requeued(self) -> str:
        if not self._trainer.is_global_zero:
            return ""
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        command = ["scontrol", "requeue", job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{' '.join(command)} failed ({error}); start the job again to go on from there"
        if done.returncode:
            return f"{' '.join(command)} failed ({done.stderr.strip()}); start the job again to go on from there"
        return f"job {job} is back in the queue, and its next start goes on from there"
