# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint's files are what was saved: by its manifest or their own sums, and one verdict for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.checkpoints import manifest, shards, unpickling
from lightning_zero3.checkpoints.places import Place


def verify(place: Place, files: list[Path], more: list[Path] | None = None) -> bool:
    """Compare files with the manifest if there is one for this tag; else with the sums inside the files.

    Args:
        place: The checkpoint.
        files: This rank's.
        more: Others that the manifest is to have.

    Returns:
        Whether there was a manifest.

    Raises:
        DamagedCheckpointError: A file isn't what was written.
    """
    known = manifest.read(place.folder)
    if known is not None and (known.tag == place.tag or "latest" in known.files):
        names = [path.relative_to(place.folder).as_posix() for path in (*files, *(more or []))]
        if place.by_latest and "latest" in known.files:
            names.append("latest")
        if known.tag == place.tag or place.by_latest:
            return manifest.verify(place.folder, names)
    for path in files:
        if path.is_file():  # else it is named as missing where it is read
            unpickling.check_sums(path, own_name=True)
    return False


@contextmanager
def as_known(path: Path) -> Iterator[None]:
    """What isn't laid out as DeepSpeed's files are fails somewhere in here, in one way or another.

    Args:
        path: The file that is read.

    Raises:
        DamagedCheckpointError: It failed so.
    """
    try:
        yield
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise manifest.DamagedCheckpointError(
            f"{path}, or the file beside it, isn't laid out as a file of ZeRO stage 3: {error!r}."
        ) from error


def judge(place: Place, answers: list[tuple[bool, list[Any]]]) -> None:
    """Compare what all ranks have seen, the same on all of them; warn of what is unverified.

    Args:
        place: The checkpoint.
        answers: Of each rank: whether there was a manifest, and what its files tell.

    Raises:
        DamagedCheckpointError: The files aren't of one save.
    """
    facts = [each for _, own in answers for each in own]
    shards.check_alike(facts, place.shards)
    if not all(verified for verified, _ in answers):
        rank_zero_warn(
            f"{place.shards} has no manifest ({manifest.MANIFEST}), so it is unverified: its files are whole and fit "
            "together as far as they show it themselves. Checkpoints saved by zero3_fast have one."
        )
        if (behind := shards.fewer_optimizer_steps(facts)) is not None:
            rank_zero_warn(behind)
