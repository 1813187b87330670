# SPDX-License-Identifier: Apache-2.0
"""Saving and removing checkpoints: Lightning's hooks about that. How one is written and committed is in `checkpoints`.

Links and removals that ``ModelCheckpoint`` asks for wait until the checkpoint that they follow is there, where that one
is written in the background; so what was the last good one goes only when the next is good.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3 import engine_end
from lightning_zero3.checkpoints import commit
from lightning_zero3.checkpoints.saver import Request, Saver, layout_of, only_upstream_can_save
from lightning_zero3.listing import shortened
from lightning_zero3.substitution import substituted
from lightning_zero3.trainer_mixin import TrainerMixin

# SLURM's requeue follows at once (``_SignalConnector``, Lightning 2.6.6).
_BEFORE_REQUEUE = "hpc_ckpt_"


class SavingStrategy(TrainerMixin):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: checkpoints that are there as a whole or not at all."""

    _saver: Saver | None = None
    _interrupted = False
    _links: ExitStack | None = None
    # The state dict that Lightning's hooks have been given.
    _offered: dict[str, Any] | None = None
    # To be removed when no link means them any more; on rank 0.
    _linked: tuple[Path, ...] = ()

    def setup(self, trainer: Any) -> None:
        """As Lightning's.

        Args:
            trainer: The Trainer.
        """
        super().setup(trainer)
        self._interrupted = False
        self._links = ExitStack()
        for callback in trainer.checkpoint_callbacks:
            _link_by(callback, self._links, self._link, self._is_pending)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As Lightning's: names, and buffers; a partitioned parameter is empty there."""
        state = super().lightning_module_state_dict()
        self._offered = dict(state)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a sharded checkpoint as a whole or not at all, in the background with ``async_save`` in a running fit.

        Args:
            checkpoint: What Lightning saves; without ``optimizer_states``, weights alone are saved.
            filepath: Where; rank 0's counts.
            storage_options: None.

        Raises:
            CheckpointNotSavedError: On all ranks, if it failed on any; the message says on which, and why.
            RuntimeError: This Trainer has no engine with an optimizer (any more).
            TypeError: ``storage_options`` is given.
        """
        offered, self._offered = self._offered, None
        self._require_something_to_save()
        upstreams = only_upstream_can_save(self.model)
        if upstreams is not None or storage_options is not None:
            if upstreams is not None:
                rank_zero_warn(upstreams)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(os.path.abspath(filepath)))
        if offered is not None:
            _warn_of_edits(offered, checkpoint.get("state_dict"))
        request = Request(
            path=path,
            client_state={k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")},
            layout=layout_of(self.parallel_layout),
            weights_only="optimizer_states" not in checkpoint,
            exclude_frozen=self.exclude_frozen_parameters,
            ranks_here=self.num_processes,
        )
        if self._saver is None:
            self._saver = Saver(self._timeout)
        self._saver.save(self.model, request, background=self._may_go_on(path))

    def finish_saving(self) -> None:
        """Wait until a checkpoint that is written in the background is at its path; on all ranks.

        Raises:
            CheckpointNotSavedError: On all ranks, if it failed on any.
        """
        if self._saver is not None:
            self._saver.finish()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do something on rank 0 once the last checkpoint is at its path, at the latest before the fit has ended.

        Args:
            action: What to do; it isn't done if that checkpoint can't be saved.
        """
        if self._saver is None:
            self._saver = Saver(self._timeout)
        self._saver.after_commit(action)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint from its path, at once, and then from the disk.

        One that a link beside it means stays until the link means another.

        Args:
            filepath: Which.
        """
        self.after_commit(partial(self._remove_unless_linked, Path(os.path.abspath(filepath))))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, after a checkpoint that all ranks have written meanwhile is committed.

        Args:
            *args: As Lightning's.
            **kwargs: As Lightning's.

        Raises:
            CheckpointNotSavedError: On all ranks, if writing it in the background failed on any.
        """
        if self._saver is not None:
            self._saver.poll()
        return super().training_step(*args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's; what a kill between two renames has left beside the path is found.

        Args:
            checkpoint_path: Where.
            weights_only: As Lightning's.
        """
        self.finish_saving()
        path = commit.survivor(Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path if path == Path(checkpoint_path) else path, weights_only)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As Lightning's, which asks before it calls :meth:`save_checkpoint`.

        Args:
            optimizer: An optimizer of this Trainer.
        """
        self._require_something_to_save()
        return super().optimizer_state(optimizer)

    def on_exception(self, exception: BaseException) -> None:
        """Note that this rank's run ends by an exception.

        Args:
            exception: Which.
        """
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """As Lightning's, after a checkpoint that is still being written is committed, or it is told why not."""
        try:
            if self._saver is not None:
                self._saver.close(after_exception=self._interrupted)
        finally:
            if self._links is not None:
                self._links.close()
            self._links = self._offered = None
            super().teardown()

    def _may_go_on(self, path: Path) -> bool:
        """Whether there will be a step or an end at which a save in the background is committed."""
        module = self.lightning_module
        state = None if module is None else module.trainer.state
        running = state is not None and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        return self.options.async_save and running and not path.name.startswith(_BEFORE_REQUEUE)

    def _require_something_to_save(self) -> None:
        if not hasattr(self.model, "save_checkpoint") or not engine_end.has_optimizer(self.model):
            gone = self.model is not None and engine_end.has_ended(self.model)
            raise RuntimeError(
                "This Trainer's engine has ended: a later run has taken over its module. Save before that run starts, "
                "or from the later run's Trainer."
                if gone
                else "There is nothing to save here: a sharded checkpoint holds optimizer states, and this Trainer has "
                "only evaluated this module. Save from the Trainer that has trained it."
            )

    def _link(self, trainer: Any, target: str, path: str) -> None:  # noqa: ARG002
        if os.path.abspath(target) != os.path.abspath(path):
            self.after_commit(partial(commit.link, Path(os.path.abspath(target)), Path(os.path.abspath(path))))
            self.after_commit(self._remove_what_was_linked)
        self.barrier()

    def _is_pending(self, path: Any) -> bool:
        return self._saver is not None and self._saver.pending == Path(os.path.abspath(path))

    def _remove_unless_linked(self, path: Path) -> None:
        if commit.is_linked(path):
            self._linked = (*self._linked, path)
        else:
            commit.remove(path)

    def _remove_what_was_linked(self) -> None:
        linked, self._linked = self._linked, ()
        for path in linked:
            self._remove_unless_linked(path)


def _link_by(callback: Any, scope: ExitStack, link: Any, is_pending: Any) -> None:
    """Have a ``ModelCheckpoint`` link and look for files by way of the strategy.

    Upstream symbols: ``ModelCheckpoint._link_checkpoint``, ``file_exists`` (Lightning 2.6.6). Reason: the old link is
    removed before the new one is made, which means a checkpoint that may be on its way still; and one on its way has a
    name that isn't free. Expires when Lightning asks the strategy to link.
    """
    if hasattr(callback, "_link_checkpoint"):
        exists = callback.file_exists
        scope.enter_context(substituted(callback, "_link_checkpoint", link))
        scope.enter_context(
            substituted(callback, "file_exists", lambda path, trainer: is_pending(path) or exists(path, trainer))
        )


def _warn_of_edits(offered: dict[str, Any], saved: Any) -> None:
    """DeepSpeed writes the module's own state: what hooks have made of Lightning's copy isn't in a checkpoint."""
    saved = saved if isinstance(saved, dict) else {}
    parts = [
        f"{what} {shortened(names)}"
        for what, names in (
            ("removed", [name for name in offered if name not in saved]),
            ("added", [name for name in saved if name not in offered]),
            ("replaced", [name for name in saved if name in offered and saved[name] is not offered[name]]),
        )
        if names
    ]
    if parts:
        rank_zero_warn(
            f"on_save_checkpoint has changed the state dict ({'; '.join(parts)}): a sharded checkpoint holds the "
            "module's own weights, so that isn't saved. Keep other values under another key of the checkpoint; "
            "frozen parameters are left out by exclude_frozen_parameters=True."
        )
