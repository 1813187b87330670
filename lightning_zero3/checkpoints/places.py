# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a path means: a folder with DeepSpeed's ``latest``, or a tag's own folder inside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

from lightning_zero3.listing import shortened

MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
_NAMED = 20


class UnfitCheckpointError(RuntimeError):
    """A checkpoint's weights don't belong to this module, or to this layout of ranks."""


class NoCheckpointError(UnfitCheckpointError, FileNotFoundError):
    """There is no sharded checkpoint where one was looked for, or none of that tag."""


@dataclass(frozen=True)
class Place:
    """Where a sharded checkpoint is.

    Args:
        folder: What ``engine.save_checkpoint`` was given.
        tag: The name of the folder inside it that holds the shards.
        by_latest: Whether the tag was read from the file ``latest``.
    """

    folder: Path
    tag: str
    by_latest: bool = False

    @property
    def shards(self) -> Path:
        """The folder that holds the shards."""
        return self.folder / self.tag


def find(path: str | Path, tag: str | None = None, *, universal: bool = False) -> Place:
    """The checkpoint that a path and a tag mean.

    Args:
        path: A folder with tags in it, or a tag's own folder: then exactly that one, whatever ``latest`` says.
        tag: The tag; None reads it from ``latest``.
        universal: Whether a Universal Checkpoint is wanted, whose file is named ``latest_universal``.

    Raises:
        NoCheckpointError: There is none; the message names the tags that there are.
    """
    folder, latest = Path(path), "latest_universal" if universal else "latest"
    if tag is not None:
        return _checked(Place(folder, str(tag)), f"there is no tag {str(tag)!r}")
    if folder.is_file():
        raise NoCheckpointError(
            f"{folder} is a file, and a sharded checkpoint is a folder. For a single file with a whole state dict pass "
            "load_full_weights=True to the strategy."
            + (f" The shard belongs to {folder.parent}." if folder.name.endswith((MODEL, OPTIMIZER)) else "")
        )
    if _holds_shards(folder):
        whole = folder.absolute()
        return Place(whole.parent, whole.name)
    if (folder / latest).is_file():
        content = (folder / latest).read_text(encoding="utf-8", errors="replace").strip()
        return _checked(Place(folder, content, by_latest=True), f"its file {latest} names {content[:100]!r}")
    raise NoCheckpointError(f"{folder} is no sharded checkpoint: it has no file named {latest}.{_offer(folder)}")


def _checked(place: Place, said: str) -> Place:
    parts = PurePath(place.tag).parts
    inside = bool(parts) and ".." not in parts and not PurePath(place.tag).is_absolute() and "\0" not in place.tag
    if not inside or not _holds_shards(place.shards):
        raise NoCheckpointError(f"{place.folder} holds no such checkpoint: {said}.{_offer(place.folder)}")
    return place


def _offer(folder: Path) -> str:
    tags = sorted(each.name for each in folder.iterdir() if _holds_shards(each)) if folder.is_dir() else []
    if not tags:
        return " No folder in it holds shards." if folder.is_dir() else " There is no such folder."
    named = shortened(tags, _NAMED)
    return f" Tags that are there: {named}. To load one, pass its folder, as in {folder / tags[-1]}."


def _holds_shards(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(f"*{MODEL}"))
