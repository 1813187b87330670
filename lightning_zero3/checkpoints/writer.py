# SPDX-License-Identifier: Apache-2.0
"""A save's files: written, flushed to the disk, read back and compared; at once, or out of a copy in host memory.

:class:`Writer` stands where the engine has its ``checkpoint_engine`` (DeepSpeed's interface for this), for the length
of one save. It raises nothing: a rank that left ``DeepSpeedEngine.save_checkpoint`` by an exception would leave the
others waiting in its barriers. What has failed is told by :attr:`Writer.error`.

The copy in memory is made by ``torch.save`` itself: it holds the very bytes that a file would, so nothing that training
does afterwards can reach it, whatever is shared with what.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_zero3.checkpoints import commit
from lightning_zero3.checkpoints.manifest import Written, measure
from lightning_zero3.optimizer.accumulation import PARTIAL_GRADIENTS

_GIB = 1024**3
_OPTIMIZER_FILE = "optim_states.pt"
# In the optimizer's part of DeepSpeed's file; ``zero_to_fp32.py`` and loads of weights alone read all the others.
_NOT_WEIGHTS = ("optimizer_state_dict", PARTIAL_GRADIENTS)


class Writer:
    """The files that this rank writes in one save.

    Args:
        theirs: The engine's own checkpoint engine, which is asked what it isn't told here.
        folder: The checkpoint, where it is written.
        weights_only: Whether optimizer states are left out.
        in_memory: Whether files are kept in host memory until :meth:`flush`.
        ranks_here: How many ranks share this host's memory.
    """

    def __init__(self, theirs: Any, folder: Path, *, weights_only: bool, in_memory: bool, ranks_here: int) -> None:
        self._theirs = theirs
        self._folder = folder
        self._weights_only = weights_only
        self._in_memory = in_memory
        self._ranks_here = ranks_here
        self._waiting: list[tuple[Path, list[bytes]]] = []
        self.files: dict[str, Written] = {}
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        """What DeepSpeed asks its checkpoint engines for, as its own would answer."""
        return getattr(self._theirs, name)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """As DeepSpeed's, without raising."""
        self._attempt(os.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: Any) -> None:
        """Write a file, or keep what it will hold.

        Args:
            state_dict: What DeepSpeed saves.
            path: Where.
        """
        self._attempt(self._save, state_dict, Path(path))

    def copy_scripts(self, copy: Any, folder: Any) -> None:
        """DeepSpeed's copy of its scripts into the checkpoint, by rank 0.

        Args:
            copy: Its own method.
            folder: The checkpoint.
        """
        self._attempt(copy, folder)

    def copy_swapped(self, copytree: Any, source: Any, target: Any, **arguments: Any) -> None:
        """DeepSpeed's copy of the optimizer's files on NVMe; at once, as the next step changes them.

        Args:
            copytree: ``shutil``'s.
            source: The folder of this rank.
            target: Where in the checkpoint.
            **arguments: For ``copytree``.
        """

        def copy() -> None:
            copytree(source, target, **arguments)
            for where, _, names in os.walk(target):
                for name in names:
                    _flush_to_disk(Path(where, name))
                    self.measured(Path(where, name))

        self._attempt(copy)

    def flush(self) -> None:
        """Write what is kept in memory, and give the memory back; then have the folder's entries on the disk."""
        while self._waiting:
            path, chunks = self._waiting.pop(0)
            self._attempt(self._write_chunks, path, chunks)
        for folder in {(self._folder / name).parent for name in self.files}:
            self._attempt(commit.sync, folder)

    def measured(self, path: Path) -> None:
        """Note a file that is on the disk already.

        Args:
            path: Which.
        """
        self.files[path.relative_to(self._folder).as_posix()] = measure(path)

    def _attempt(self, function: Any, *arguments: Any, **named: Any) -> None:
        if self.error is None:
            try:
                function(*arguments, **named)
            except Exception as error:
                self.error = error
                self._waiting.clear()

    def _save(self, state: Any, path: Path) -> None:
        if self._weights_only and path.name.endswith(_OPTIMIZER_FILE):
            inner = state["optimizer_state_dict"]
            state = {**state, "optimizer_state_dict": {k: v for k, v in inner.items() if k not in _NOT_WEIGHTS}}
        format_of = getattr(self._theirs, "zipfile_serialization", None)
        if format_of is None:  # FastCheckpointEngine
            self._theirs.save(state, str(path))
            _flush_to_disk(path)
            self.measured(path)
        elif self._in_memory:
            self._require_memory(sum(storage.nbytes() for storage in _storages(state)))
            kept: Any = _Kept()
            torch.save(state, kept, _use_new_zipfile_serialization=format_of)
            self._waiting.append((path, kept.chunks))
        else:
            file: Any
            with _Digested(path) as file:
                torch.save(state, file, _use_new_zipfile_serialization=format_of)
            self._note(path, file.written)

    def _write_chunks(self, path: Path, chunks: list[bytes]) -> None:
        with _Digested(path) as file:
            chunks.reverse()
            while chunks:
                file.write(chunks.pop())
        self._note(path, file.written)

    def _note(self, path: Path, written: Written) -> None:
        seen = measure(path)
        if seen != written:
            raise OSError(
                f"{path} reads as {seen.size:,} bytes with SHA-256 {seen.sha256[:16]}…, and {written.size:,} bytes "
                f"with {written.sha256[:16]}… were written"
            )
        self.files[path.relative_to(self._folder).as_posix()] = written

    def _require_memory(self, needed: int) -> None:
        available = psutil.virtual_memory().available // self._ranks_here
        if needed > available:
            raise MemoryError(
                f"async_save keeps a copy of what is saved in host memory: {needed / _GIB:.1f} GiB more on this rank, "
                f"where {available / _GIB:.1f} GiB are free for each of {self._ranks_here}. Set async_save=False."
            )


class _Kept:
    """A file in memory, in the pieces that it is written in; growing one buffer would take up to twice as much."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def write(self, data: Any) -> int:
        self.chunks.append(bytes(data))
        return len(self.chunks[-1])

    def flush(self) -> None:
        """Nothing to do."""


class _Digested:
    """A file that knows what was written to it.

    ``write`` raises nothing until the end: C++ calls it, and an exception there leaves torch's archive half closed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._size = path, hashlib.sha256(), 0
        self._error: OSError | None = None

    def __enter__(self) -> _Digested:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                # What is read back now comes from the disk or the server, not out of this host's memory.
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path))

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
                self._digest.update(data)
                self._size += length
            except OSError as error:
                self._error = error
        return length

    def flush(self) -> None:
        """Done at the end."""

    @property
    def written(self) -> Written:
        return Written(self._size, self._digest.hexdigest())


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _storages(state: Any) -> Iterator[torch.UntypedStorage]:
    """Each storage of the tensors in dictionaries, lists and tuples, once."""
    seen: set[int] = set()
    left = [state]
    while left:
        value = left.pop()
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
