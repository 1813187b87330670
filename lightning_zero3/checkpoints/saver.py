# SPDX-License-Identifier: Apache-2.0
"""A save from its first folder to its commit, on all ranks together: at once, or while training goes on.

Every rank writes its files beside the path; what has failed on any of them is told to all before anybody goes on, so
that they stop together, with the previous checkpoint as it was. Rank 0 then writes the manifest and moves the
checkpoint to its path (:mod:`~lightning_zero3.checkpoints.commit`).

In the background only files are written, by a thread that takes part in no collective. Whether all ranks have written
theirs is asked at the next micro-batches, by a reduction of two numbers over gloo on the CPU, while a save is on its
way and at no other time: so all ranks commit, and raise, before the same micro-batch.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import distributed as dist

from lightning_zero3.checkpoints import commit, manifest
from lightning_zero3.checkpoints.manifest import Manifest, Written
from lightning_zero3.checkpoints.writer import Writer
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology

# Lightning looks for a folder of this name, and DeepSpeed's ``latest`` holds it.
TAG = "checkpoint"
# After an exception on this rank the others may never come.
_AFTER_AN_EXCEPTION = timedelta(seconds=20)
# Linux' acdirmax.
_NFS_REMEMBERS_SECONDS = 60.0
_BETWEEN_LOOKS_SECONDS = 0.5


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint couldn't be saved, for what the message says of which rank; earlier ones are as they were."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be saved, and where.

    Args:
        path: The checkpoint.
        client_state: What Lightning saves beside the engine's state.
        layout: Numbers of ranks by kind, for the manifest.
        weights_only: Whether optimizer states are left out.
        exclude_frozen: Whether frozen parameters are left out.
        ranks_here: How many ranks share this host's memory.
    """

    path: Path
    client_state: Mapping[str, Any]
    layout: Mapping[str, int]
    weights_only: bool = False
    exclude_frozen: bool = False
    ranks_here: int = 1


def layout_of(layout: Topology) -> dict[str, int]:
    """What a manifest says of a run's layout.

    Args:
        layout: The run's.
    """
    return {"ranks" if name == "world_size" else name: size for name, size in asdict(layout).items()}


def only_upstream_can_save(engine: Any) -> str | None:
    """Why DeepSpeed has to save by itself, as a warning; None where it needn't.

    Args:
        engine: DeepSpeed's engine.
    """
    theirs = engine.checkpoint_engine
    if engine.use_node_local_storage():
        why = "checkpoint.use_node_local_storage is set in the DeepSpeed config"
    elif theirs.is_decoupled():
        why = f"The DeepSpeed config asks for {type(theirs).__name__}"
    else:
        return None
    return f"{why}: DeepSpeed saves by itself, and a save that is cut short isn't noticed."


@dataclass
class _OnItsWay:
    request: Request
    staging: commit.Staging | None
    writer: Writer
    written: Future[None]


class Saver:
    """Saves checkpoints of an engine.

    Args:
        timeout: How long ranks wait for each other while a save is in the background; None for torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: Any = None
        # Whose members don't wait for each other for long.
        self._last_group: Any = None
        self._pending: _OnItsWay | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def pending(self) -> Path | None:
        """The checkpoint that is being written in the background."""
        return None if self._pending is None else self._pending.request.path

    def save(self, engine: Any, request: Request, *, background: bool = False) -> None:
        """Save; on all ranks.

        Args:
            engine: DeepSpeed's engine.
            request: What, and where.
            background: Whether to return when everything is copied to host memory.

        Raises:
            CheckpointNotSavedError: On all ranks, where it failed on any; for an earlier save in the background, too.
        """
        self.finish()
        if background and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._last_group = dist.new_group(backend="gloo", timeout=_AFTER_AN_EXCEPTION)
        staging = _begin(request.path)
        folder = commit.folder_for(request.path)
        writer = Writer(
            engine.checkpoint_engine,
            folder,
            weights_only=request.weights_only,
            in_memory=background,
            ranks_here=request.ranks_here,
        )
        try:
            with _writing_through(engine, writer):
                engine.save_checkpoint(
                    str(folder),
                    tag=TAG,
                    client_state=dict(request.client_state),
                    save_latest=False,
                    exclude_frozen_parameters=request.exclude_frozen,
                )
        except Exception as error:
            # Ours raise nothing, so it is DeepSpeed's own state, or a collective in it: a rank that is gone.
            _abandon(staging)
            raise CheckpointNotSavedError(
                f"{request.path} isn't saved; what was there is as it was. DeepSpeed, on rank {dist.get_rank()}: "
                f"{error!r}. If that is about a connection, another rank has ended."
            ) from error
        if background:
            _raise_together(request.path, writer.error, staging)
            executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = _OnItsWay(request, staging, writer, executor.submit(writer.flush))
            executor.shutdown(wait=False)
        else:
            writer.flush()
            _commit(request, staging, writer)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do something on rank 0 once there is nothing on its way, and not at all if that save fails.

        Args:
            action: What removes or links checkpoints, in the order in which it is asked for.
        """
        if dist.get_rank() != 0:
            return
        if self._pending is None:
            _try(action)
        else:
            self._then.append(action)

    def poll(self) -> None:
        """Commit a save in the background if all ranks have written their files; on all ranks.

        Raises:
            CheckpointNotSavedError: On all ranks, where it failed on any.
        """
        if self._pending is None:
            return
        done = torch.tensor([float(self._pending.written.done())])
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._group)
        if done.item() == 1:
            self.finish()

    def finish(self) -> None:
        """Wait for a save in the background, and commit it; on all ranks.

        Raises:
            CheckpointNotSavedError: On all ranks, where it failed on any.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.written.result()
        self._commit_pending(pending, self._group)

    def _commit_pending(self, pending: _OnItsWay, group: Any) -> None:
        then, self._then = self._then, []
        _commit(pending.request, pending.staging, pending.writer, group, then)

    def close(self, *, after_exception: bool = False) -> None:
        """Finish, and give back what was made for saves in the background.

        Args:
            after_exception: Whether this rank is ending by an exception. Others may still be training: it waits for
                them for a while only, and warns where they don't come.

        Raises:
            CheckpointNotSavedError: On all ranks, where it failed on any; not after an exception.
        """
        groups = [self._group, self._last_group]
        try:
            if after_exception and self._pending is not None:
                self._finish_after_exception(self._pending)
            else:
                self.finish()
        finally:
            self._pending, self._then, self._group, self._last_group = None, [], None, None
        for group in groups:
            if group is not None and not after_exception:
                dist.destroy_process_group(group)

    def _finish_after_exception(self, pending: _OnItsWay) -> None:
        path = pending.request.path
        pending.written.result()
        try:
            dist.barrier(group=self._last_group)
        except RuntimeError:
            # Each rank for itself: this isn't about rank 0.
            print(
                f"Rank {dist.get_rank()}: {path} was being written when training ended by an exception, and other "
                "ranks don't answer: it isn't committed. Earlier checkpoints are as they were.",
                flush=True,
            )
            _abandon(pending.staging)
            return
        try:
            self._commit_pending(pending, self._last_group)
        except CheckpointNotSavedError as error:
            print(f"Rank {dist.get_rank()}: {error}", flush=True)


def _begin(path: Path) -> commit.Staging | None:
    """Rank 0 makes the folder; all see it, or none goes on."""
    staging, error = None, None
    if dist.get_rank() == 0:
        try:
            staging = commit.begin(path)
        except Exception as raised:
            error = raised
    _raise_together(path, error, staging)
    host = [socket.gethostname()]
    dist.broadcast_object_list(host, src=0)
    if not _appears(commit.folder_for(path)):
        error = OSError(
            f"{commit.folder_for(path)}, which rank 0 has made on {host[0]}, isn't there on {socket.gethostname()}. A "
            "checkpoint is one folder: all nodes must share it (NFS, Lustre, …)"
        )
    _raise_together(path, error, staging)
    return staging


def _appears(folder: Path) -> bool:
    """Whether a folder that another host has made is seen here; NFS remembers for a while what wasn't there."""
    until = time.monotonic() + _NFS_REMEMBERS_SECONDS
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        time.sleep(_BETWEEN_LOOKS_SECONDS)
    return True


@contextmanager
def _writing_through(engine: Any, writer: Writer) -> Iterator[None]:
    """DeepSpeed writes by way of a writer, whatever it writes.

    Upstream symbols: ``DeepSpeedEngine.checkpoint_engine`` and ``_copy_recovery_script``, ``shutil.copytree`` as
    ``save_checkpoint`` imports it for the optimizer's files on NVMe (0.19.7, 0.19.8). Reason: an exception on one rank
    leaves the others in a barrier. Expires when DeepSpeed writes everything through its checkpoint engine.
    """
    scripts = engine._copy_recovery_script
    with ExitStack() as scope:
        scope.enter_context(substituted(engine, "checkpoint_engine", writer))
        scope.enter_context(
            substituted(engine, "_copy_recovery_script", lambda folder: writer.copy_scripts(scripts, folder))
        )
        if engine.zero_nvme_offload_optimizer():
            copy = functools.partial(writer.copy_swapped, shutil.copytree)
            scope.enter_context(substituted(shutil, "copytree", copy))
        yield


def _commit(
    request: Request,
    staging: commit.Staging | None,
    writer: Writer,
    group: Any = None,
    then: Sequence[Callable[[], None]] = (),
) -> None:
    """Gather what was written, move the checkpoint to its path, and do what waits for that; no rank leaves before."""
    files = _raise_together(request.path, writer.error, staging, writer.files, group)
    error: Exception | None = None
    if staging is not None:
        try:
            _complete(request, staging, files)
            staging = None
            for action in then:
                _try(action)
        except Exception as raised:
            error = raised
    _raise_together(request.path, error, staging, group=group)


def _complete(request: Request, staging: commit.Staging, files: dict[str, Written]) -> None:
    folder = staging.folder
    (folder / "latest").write_text(TAG, encoding="utf-8")
    for name, written in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != written.size:
            raise OSError(
                f"{folder / name} {'is missing' if size is None else f'has {size:,} bytes'} as rank 0 sees it on "
                f"{socket.gethostname()}, and {written.size:,} were written: all nodes must share one folder"
            )
    beside = [path for path in folder.iterdir() if path.is_file()]
    for path in beside:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    every = {**files, **{path.name: manifest.measure(path) for path in beside}}
    manifest.write(folder, Manifest(TAG, request.layout, request.weights_only, every))
    commit.complete(staging)


def _raise_together(
    path: Path,
    error: Exception | None,
    staging: commit.Staging | None,
    files: dict[str, Written] | None = None,
    group: Any = None,
) -> dict[str, Written]:
    """All ranks' files; or the same error on all ranks."""
    mine = None if error is None else f"rank {dist.get_rank()} ({socket.gethostname()}): {_said(error)}"
    answers: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(answers, (mine, files or {}), group=group)
    except RuntimeError as gone:
        _abandon(staging)
        raise CheckpointNotSavedError(
            f"{path} isn't saved, or just now; nothing in between. Another rank has ended or doesn't answer: {gone}"
        ) from (error or gone)
    errors = [said for said, _ in answers if said is not None]
    if errors:
        _abandon(staging)
        raise CheckpointNotSavedError(
            f"{path} isn't saved; what was there is as it was. {'; '.join(errors)}."
        ) from error
    return {name: written for _, theirs in answers for name, written in theirs.items()}


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _abandon(staging: commit.Staging | None) -> None:
    """The next save tries again where this fails."""
    if staging is not None:
        with suppress(OSError):
            commit.abandon(staging)


def _try(action: Callable[[], None]) -> None:
    """On rank 0 alone, so it must not raise: the others go on."""
    try:
        action()
    except Exception as error:
        rank_zero_warn(f"A checkpoint is saved, but what was to follow it has failed: {error!r}.")
