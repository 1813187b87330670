# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint comes to be at its path, and goes from there: by one rename each, so that no half of one is seen.

A checkpoint ``DIR/NAME`` is written to ``DIR/.saving/NAME/new`` and moved to ``DIR/NAME`` when it is complete. One that
is there already changes places with it (``renameat2`` with ``RENAME_EXCHANGE``, on Linux' local file systems and
overlays); where the file system can't do that (NFS), it is moved to ``DIR/.saving/NAME/previous`` first, and
:func:`survivor` finds it, or the new one, after a kill between the two renames. What is removed leaves its path by a
rename as well, before anything in it is deleted.

``.saving`` is a folder of its own because Lightning takes whatever has ``ckpt_`` in its name beside a SLURM checkpoint
for one (``_CheckpointConnector``, 2.6.6). It is gone when nothing is being saved.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_zero3.checkpoints.manifest import MANIFEST

ROOM = ".saving"
_NEW, _PREVIOUS, _REMOVED, _LINK = "new", "previous", "removed", "link"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# What file systems and kernels say that don't have it.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Staging:
    """A checkpoint that is being written; on rank 0.

    Args:
        path: Where it shall be.
        folder: Where it is until then.
        lock: An open file that holds the lock on its room, which a killed process leaves free; None where the file
            system has no locks.
    """

    path: Path
    folder: Path
    lock: int | None


def folder_for(path: Path) -> Path:
    """Where a checkpoint is written until it is complete.

    Args:
        path: Where it shall be.
    """
    return _room(path) / _NEW


def begin(path: Path) -> Staging:
    """Make an empty folder for a new checkpoint, after what killed saves have left in its directory is cleared away.

    Args:
        path: Where it shall be.

    Raises:
        OSError: The folder can't be made, or another process is saving to the same path.
    """
    rooms = path.parent / ROOM
    with suppress(FileNotFoundError):
        for other in sorted(rooms.iterdir()):
            if other.name != path.name:
                _clear_if_left(path.parent / other.name)
    room = _room(path)
    room.mkdir(parents=True, exist_ok=True)
    lock, free = _lock(room)
    if not free:
        raise OSError(errno.EBUSY, "Another process is saving to it", str(path))
    try:
        _put_back(path)
        _empty(room)
        folder_for(path).mkdir()
    except OSError:
        _unlock(lock)
        raise
    return Staging(path, folder_for(path), lock)


def complete(staging: Staging) -> None:
    """Move a checkpoint to its path, at once; what was there is deleted afterwards.

    Args:
        staging: With all of its files written to the disk.

    Raises:
        OSError: It couldn't be moved; what was at its path is still there, or :func:`survivor` finds it.
    """
    sync(staging.folder)
    _put(staging.folder, staging.path)
    sync(staging.path.parent)
    # It is saved; what can't be deleted now is by the next save.
    with suppress(OSError):
        abandon(staging)


def abandon(staging: Staging) -> None:
    """Delete what a save has left in its room, and the room.

    Args:
        staging: What :func:`begin` has made.

    Raises:
        OSError: What was at its path can't be put back there.
    """
    previous = _room(staging.path) / _PREVIOUS
    try:
        if previous.exists() and not os.path.lexists(staging.path):
            previous.rename(staging.path)
        _empty(_room(staging.path))
    finally:
        _unlock(staging.lock)
    _leave(staging.path)


def survivor(path: Path) -> Path:
    """The checkpoint that a path means: what is there, or what a kill in the middle of its replacement has left.

    Args:
        path: A checkpoint's path.

    Returns:
        ``path`` itself where something is there, or where nothing has survived either.
    """
    if os.path.lexists(path):
        return path
    room = _room(path)
    if (room / _NEW / MANIFEST).is_file():
        return room / _NEW
    return room / _PREVIOUS if (room / _PREVIOUS).exists() else path


def remove(path: Path) -> None:
    """Remove a checkpoint, or a link to one: first from its path, at once, then from the disk.

    Args:
        path: What to remove; if there is nothing, nothing happens.

    Raises:
        OSError: It can't be moved from its path.
    """
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        gone = _room(path) / _REMOVED
        gone.parent.mkdir(parents=True, exist_ok=True)
        _delete(gone)
        path.rename(gone)
        sync(path.parent)
        _delete(gone)
        _leave(path)


def link(target: Path, path: Path) -> None:
    """Let a path be a symbolic link to a checkpoint, whatever was there before, at once.

    Args:
        target: The checkpoint.
        path: The link.

    Raises:
        OSError: It can't be made.
    """
    new = _room(path) / _LINK
    new.parent.mkdir(parents=True, exist_ok=True)
    _delete(new)
    new.symlink_to(os.path.relpath(target, path.parent))
    _put(new, path)
    sync(path.parent)
    _empty(_room(path))
    _leave(path)


def is_linked(path: Path) -> bool:
    """Whether a link beside a checkpoint means it.

    Args:
        path: The checkpoint.
    """
    with suppress(OSError):
        return not path.is_symlink() and any(
            other.is_symlink() and other.resolve() == path.resolve() for other in path.parent.iterdir()
        )
    return False


def sync(folder: Path) -> None:
    """Have a folder's entries written to the disk.

    Args:
        folder: Which.

    Raises:
        OSError: That fails.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that have no such thing
            raise
    finally:
        os.close(opened)


def _room(path: Path) -> Path:
    return path.parent / ROOM / path.name


def _put(new: Path, path: Path) -> None:
    if not os.path.lexists(path) or (new.is_symlink() and not (path.is_dir() and not path.is_symlink())):
        new.replace(path)
    elif not _exchange(new, path):
        previous = new.parent / _PREVIOUS
        _delete(previous)
        path.rename(previous)
        new.rename(path)
    # Else what was at the path is in the room now, to be deleted with it.


def _exchange(new: Path, path: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(path))


def _put_back(path: Path) -> None:
    """Give a path what was to be there, or had been, when a save was killed between two renames."""
    left = survivor(path)
    if left != path:
        left.rename(path)
        sync(path.parent)


def _clear_if_left(path: Path) -> None:
    """Clear another path's room, if no living process is in it."""
    room = _room(path)
    with suppress(OSError):
        lock, free = _lock(room)
        if lock is not None and free:
            _put_back(path)
            _empty(room)
            _unlock(lock)
            _leave(path)


def _lock(room: Path) -> tuple[int | None, bool]:
    """A lock on a folder, and whether it was free; no lock where the file system has none."""
    opened = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        if error.errno not in (*_NO_LOCKS, errno.EWOULDBLOCK, errno.EACCES):
            raise
        return None, error.errno in _NO_LOCKS
    return opened, True


def _unlock(lock: int | None) -> None:
    if lock is not None:
        # Closing alone isn't enough: a loader's worker that was forked meanwhile has the file open, too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _empty(room: Path) -> None:
    for entry in room.iterdir():
        _delete(entry)


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _leave(path: Path) -> None:
    """Take away rooms that are empty."""
    with suppress(OSError):
        _room(path).rmdir()
        _room(path).parent.rmdir()
