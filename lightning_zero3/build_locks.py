# SPDX-License-Identifier: Apache-2.0
"""Locks of PyTorch's extension builds: which there are, and which no process holds any more.

``torch.utils.cpp_extension`` guards the build of each op by a file ``lock`` in the op's folder. Whoever finds it waits
until it's gone, silently and for ever (``torch.utils.file_baton.FileBaton.wait`` looks for the file and for nothing
else), and a process that is killed leaves it behind. Upstream symbol: ``FileBaton`` (torch 2.8 to 2.13). Expires when
torch locks with ``flock``, which ends with the process.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

State = Literal["held", "abandoned", "unknown"]

# A build touches its folder at least this often (DeepSpeed's CPU op compiles in half a minute on two cores).
QUIET_BUILD_SECONDS = 180
# FileBaton closes its file a moment before it removes it.
_SECOND_LOOK_SECONDS = 0.2
# Where a process of another machine may hold a lock.
_NETWORK_FILESYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "glusterfs", "wekafs")


@dataclass(frozen=True)
class BuildLock:
    """A lock file and what is known of whoever made it.

    Args:
        path: The file.
        state: ``held`` by a living process; ``abandoned``, so that every run that builds or loads the op waits for
            ever; ``unknown``, where whoever made it can't be seen from here.
        seen: What was looked at and found, in words.
    """

    path: Path
    state: State
    seen: str

    @property
    def op(self) -> str:
        """Name of the op whose build it guards."""
        return self.path.parent.name

    @property
    def remedy(self) -> str:
        """What ends the wait."""
        if self.state == "held":
            return "wait until that process is done"
        if self.state == "unknown":
            return f"if no machine or user compiles {self.op} now, delete it: rm {self.path}"
        return f"delete it: rm {self.path}"


def roots() -> list[Path]:
    """The folders in which runs of this environment build: ``TORCH_EXTENSIONS_DIR``, or all that are used without it.

    They need not exist.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return [Path(named)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    # torch's default has a folder for each release of Python and accelerator; ours on a CPU is the environment's.
    return [
        Path(sys.prefix) / "torch_extensions",
        *sorted(cache.glob(f"py{sys.version_info.major}{sys.version_info.minor}*")),
    ]


def find() -> list[BuildLock]:
    """Every build lock of any op in :func:`roots`, with its state."""
    return [judge(path) for root in roots() for path in _lock_files(root)]


def judge(path: Path) -> BuildLock:
    """Find out whether somebody holds a lock.

    torch's lock keeps its file open as long as it holds it, so a lock that no process has open is nobody's. Processes
    of other users, and those of other machines or containers that share the folder, can't be seen.

    Args:
        path: The lock file.
    """
    try:
        owner = path.stat().st_uid
    except OSError:
        return BuildLock(path, "held", "it was just being released")
    holder = holder_of(path)
    if holder is None:
        time.sleep(_SECOND_LOOK_SECONDS)
        if not path.exists():
            return BuildLock(path, "held", "it was just being released")
        holder = holder_of(path)
    if holder is not None:
        return BuildLock(path, "held", f"process {holder} has it open")
    quiet = time.time() - last_change(path.parent)
    seen = f"no process has it open, and its folder has been quiet for {quiet:.0f} s"
    if owner != os.getuid() and os.getuid() != 0:
        return BuildLock(path, "unknown", f"it belongs to another user (id {owner}), whose processes can't be seen")
    filesystem = _filesystem_of(path)
    if filesystem.startswith(_NETWORK_FILESYSTEMS) and quiet < QUIET_BUILD_SECONDS:
        return BuildLock(path, "unknown", f"{seen}; on {filesystem}, a process of another machine may hold it")
    return BuildLock(path, "abandoned", seen)


def holder_of(lock: Path) -> str | None:
    """The id and name of a process of this machine that has the file open.

    Args:
        lock: The lock file.
    """
    resolved = os.path.realpath(lock)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(os.path.realpath(file.path) == resolved for file in process.open_files()):
                return f"{process.pid} ({process.name()})"
    return None


def last_change(folder: Path) -> float:
    """When something in a folder was last modified, in seconds since the epoch; now, if it is just being taken away.

    Args:
        folder: An op's build folder.
    """
    times = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


def warn_of_abandoned() -> None:
    """Name every lock that would make a run wait for ever, before it does."""
    for lock in find():
        if lock.state == "abandoned":
            warnings.warn(
                f"{lock.path} was left behind by a killed process ({lock.seen}). A run that needs DeepSpeed's "
                f"{lock.op} waits for it for ever, without a word: {lock.remedy}",
                stacklevel=2,
            )


def _lock_files(root: Path) -> Iterator[Path]:
    with suppress(OSError):  # no folder, or none that can be read
        yield from sorted(root.glob("*/lock"))


def _filesystem_of(path: Path) -> str:
    """The type of the file system that a file is on, as the kernel names it; empty if unknown."""
    resolved = os.path.realpath(path)
    with suppress(psutil.Error, OSError):
        mounts = [m for m in psutil.disk_partitions(all=True) if _is_under(resolved, m.mountpoint)]
        if mounts:
            return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype)
    return ""


def _is_under(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
