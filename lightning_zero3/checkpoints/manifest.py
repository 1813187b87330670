# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of: a file beside the shards that names each of them, with its size and its SHA-256.

DeepSpeed's own ``latest`` names a tag and nothing else: a shard that is cut short, missing, or another run's isn't
noticed. The manifest is written last, so a checkpoint that has one was finished. ``sha256sum`` computes the same sums.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK = 16 * 1024 * 1024
_NAMED = 5


class DamagedCheckpointError(RuntimeError):
    """A checkpoint's files aren't those that were written; the message names a file and what is wrong with it."""


@dataclass(frozen=True)
class Written:
    """A file as it was written.

    Args:
        size: Bytes.
        sha256: Its checksum, in hexadecimal digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What :data:`MANIFEST` says.

    Args:
        tag: DeepSpeed's tag: the folder of the shards inside the checkpoint.
        layout: Numbers of ranks by kind: ``ranks``, ``expert_parallel_size``, ``tensor_parallel_size``.
        weights_only: Whether there are no optimizer states.
        files: By name relative to the checkpoint, with ``/`` between folders.
    """

    tag: str
    layout: Mapping[str, int]
    weights_only: bool = False
    files: Mapping[str, Written] = field(default_factory=dict)


def measure(path: Path) -> Written:
    """Size and checksum of a file, as it is on the disk.

    Args:
        path: The file.

    Raises:
        OSError: It can't be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Written(size, digest.hexdigest())


def write(folder: Path, manifest: Manifest) -> None:
    """Write a checkpoint's manifest; on rank 0, when all files are written and measured.

    Args:
        folder: The checkpoint.
        manifest: What it holds; ``files`` are those of all ranks.

    Raises:
        OSError: It can't be written.
    """
    unfinished = folder / f"{MANIFEST}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, **asdict(manifest)}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)


def read(folder: Path) -> Manifest | None:
    """A checkpoint's manifest; None where there is none, as in one that stock has written.

    Args:
        folder: The checkpoint.

    Raises:
        DamagedCheckpointError: It can't be understood.
    """
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise DamagedCheckpointError(f"{path} has format {content['format']}, and {_FORMAT} is known here.")
        files = {name: Written(int(each["size"]), str(each["sha256"])) for name, each in content["files"].items()}
        return Manifest(str(content["tag"]), dict(content["layout"]), bool(content["weights_only"]), files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} can't be read ({error!r}): the checkpoint is damaged.") from error


def verify(folder: Path, names: Collection[str] | None = None, *, checksums: bool = True) -> bool:
    """Compare a checkpoint with its manifest.

    That all files are there, and no others beside the shards, is seen by listing the tag's folder. Sizes and checksums
    are those of ``names``: among thousands of ranks, each reads its own files only.

    Args:
        folder: The checkpoint.
        names: Relative to it, with ``/``: what is about to be read; None means every file.
        checksums: Whether contents are read; else only sizes are compared.

    Returns:
        False where there is no manifest, so that nothing is known.

    Raises:
        DamagedCheckpointError: A file is missing, has another size or another checksum, or isn't this checkpoint's.
    """
    manifest = read(folder)
    if manifest is None:
        return False
    there = _files_in(folder, manifest.tag)
    for name in manifest.files:
        if name not in there and not (folder / name).is_file():
            raise DamagedCheckpointError(f"{folder / name} is missing; {MANIFEST} names it.")
    foreign = sorted(there - set(manifest.files))
    if foreign:
        raise DamagedCheckpointError(
            f"{folder / foreign[0]} isn't of this checkpoint: {MANIFEST} doesn't name it"
            f"{_more(foreign)}. Remove what was put there, or load another checkpoint."
        )
    for name in manifest.files if names is None else names:
        if name not in manifest.files:
            raise DamagedCheckpointError(f"{folder / name} isn't of this checkpoint: {MANIFEST} doesn't name it.")
        _compare(folder / name, manifest.files[name], checksums)
    return True


def _compare(path: Path, wanted: Written, checksums: bool) -> None:
    size = path.stat().st_size
    if size != wanted.size:
        raise DamagedCheckpointError(f"{path} has {size:,} bytes, and was written with {wanted.size:,}.")
    if not checksums:
        return
    try:
        seen = measure(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} can't be read: {error}.") from error
    if seen != wanted:
        raise DamagedCheckpointError(
            f"{path} has SHA-256 {seen.sha256[:16]}…, and was written with {wanted.sha256[:16]}…: another run's, or "
            "changed since."
        )


def _files_in(folder: Path, tag: str) -> set[str]:
    return {
        Path(where, name).relative_to(folder).as_posix() for where, _, names in os.walk(folder / tag) for name in names
    }


def _more(names: list[str]) -> str:
    others = [Path(name).name for name in names[1:_NAMED]]
    return f", nor {', '.join(others)}{', …' if len(names) > _NAMED else ''}" if others else ""
