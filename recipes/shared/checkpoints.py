# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a recipe as folders: which are complete, which is the last, and whether this run can go on from one.

That a checkpoint's files are there and whole is what its manifest says (:mod:`lightning_zero3.checkpoints.manifest`).
:data:`MARKER` lies beside it and says which training it belongs to: written last, under another name first and then
renamed, so that a checkpoint without it isn't a recipe's, or its run was killed just then.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero3.checkpoints import commit, manifest
from lightning_zero3.config import SetupError
from shared.settings import Settings

MARKER = "completed.json"
FOLDER = "checkpoints"
_FORMAT = 2
_STEP = re.compile(r"step_(\d+)")
_VERSION = re.compile(r"version_(\d+)")
# What a checkpoint holds in a form that depends on them, what decides which samples come next, and what it overrules.
_SAME = (
    "size",
    "layers",
    "tokenizer",
    "sequence_length",
    "micro_batch_size",
    "accumulate_grad_batches",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "sub_group_size",
    "precision",
    "bf16_masters",
    "tensor_parallel_size",
    "router_bias_update_speed",
    "seed",
)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Args:
        path: Its folder.
        step: Optimizer steps taken.
        first_run: Folder of the run that the first steps were taken in; the same for all that were resumed from it.
        made_by: See :func:`identity`.
    """

    path: Path
    step: int
    first_run: str
    made_by: dict[str, Any]


def identity(settings: Settings, *, recipe: str, ranks: int, expert_parallel_size: int, data: str) -> dict[str, Any]:
    """What has to be the same for a run to go on where another has ended.

    Args:
        settings: The run's.
        recipe: What the model is called.
        ranks: The number of ranks.
        expert_parallel_size: The one that is used.
        data: The description of the tokens, with their fingerprint.
    """
    chosen = {name: getattr(settings, name) for name in _SAME}
    return {"recipe": recipe, "ranks": ranks, "expert_parallel_size": expert_parallel_size, "data": data, **chosen}


def folder_of(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run / FOLDER / f"step_{step:08d}"


def complete(path: Path, *, step: int, first_run: str, made_by: dict[str, Any]) -> None:
    """Mark a saved checkpoint as a recipe's; on one rank.

    Args:
        path: Its folder.
        step: Optimizer steps taken.
        first_run: See :class:`Checkpoint`.
        made_by: See :func:`identity`.
    """
    content = {"format": _FORMAT, "step": step, "first_run": first_run, "made_by": made_by}
    unfinished = path / f"{MARKER}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path / MARKER)


def read(path: Path) -> Checkpoint:
    """A checkpoint, if it is complete.

    Args:
        path: Its folder.

    Raises:
        SetupError: It isn't there, isn't complete, or isn't a recipe's.
    """
    if not path.is_dir():
        raise SetupError(f"--resume {path}: there's no such folder.")
    try:
        content = json.loads((path / MARKER).read_text(encoding="utf-8"))
        checkpoint = Checkpoint(path, int(content["step"]), str(content["first_run"]), dict(content["made_by"]))
    except FileNotFoundError as error:
        raise SetupError(
            f"--resume {path}: no {MARKER} in it, so it isn't a recipe's checkpoint, or its run was killed while it "
            f"was written. Choose another, or --resume auto for the last complete one."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(f"--resume {path}: {MARKER} can't be read ({error!r}). Choose another checkpoint.") from error
    try:
        # Contents are compared when they are loaded, by each rank those that it reads.
        whole = manifest.verify(path, checksums=False)
    except manifest.DamagedCheckpointError as error:
        raise SetupError(
            f"--resume {path}: {error} Choose another checkpoint. All nodes need the same shared folder."
        ) from error
    if not whole:
        raise SetupError(f"--resume {path}: no {manifest.MANIFEST} in it. Choose another checkpoint.")
    return checkpoint


def all_complete(output: Path) -> list[Checkpoint]:
    """Complete checkpoints of all runs in a folder for runs, the last one last; runs are in the order of their numbers.

    Args:
        output: A folder of ``version_N``, or one of them.
    """
    found: list[tuple[int, int, Checkpoint]] = []
    for folder in (output, *(output.iterdir() if output.is_dir() else ())):
        version = _VERSION.fullmatch(folder.name)
        if version is None or not (folder / FOLDER).is_dir():
            continue
        for path in (folder / FOLDER).iterdir():
            if _STEP.fullmatch(path.name) is None:
                continue
            try:
                checkpoint = read(path)
            except SetupError:
                continue
            found.append((int(version[1]), checkpoint.step, checkpoint))
    return [checkpoint for _, _, checkpoint in sorted(found, key=lambda entry: entry[:2])]


def prune(output: Path, first_run: str, keep: int) -> None:
    """Delete all but the last checkpoints of one training, in whichever runs it was taken up.

    Args:
        output: The folder for runs.
        first_run: Which training; others' checkpoints stay.
        keep: How many stay.
    """
    ours = [checkpoint for checkpoint in all_complete(output) if checkpoint.first_run == first_run]
    for checkpoint in ours[:-keep]:
        commit.remove(checkpoint.path)


def to_resume(settings: Settings, made_by: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint that ``--resume`` asks for.

    Args:
        settings: The run's.
        made_by: What :func:`identity` says of this run.

    Returns:
        None without ``--resume``, and with ``--resume auto`` where there's none yet, as at a job's first start.

    Raises:
        SetupError: It is missing, incomplete, of a run with other sizes, or has as many steps as are asked for.
    """
    if settings.resume is None:
        return None
    if settings.resume == "auto":
        found = all_complete(settings.output)
        if not found:
            return None
        checkpoint = found[-1]
    else:
        path = Path(settings.resume).expanduser()
        inside = all_complete(path) if path.is_dir() and _STEP.fullmatch(path.name) is None else []
        checkpoint = inside[-1] if inside else read(path)
    there = checkpoint.made_by
    differences = [
        f"{name} is {there.get(name)} there and {value} here"
        for name, value in made_by.items()
        if there.get(name) != value
    ]
    if differences:
        raise SetupError(
            f"--resume {settings.resume}: {checkpoint.path} was made by another run: {'; '.join(differences)}. "
            "Go on with the same sizes, data and rates, name another checkpoint, or leave --resume out (or choose "
            "another --output) to start anew."
        )
    if checkpoint.step >= settings.steps:
        raise SetupError(
            f"--resume {settings.resume}: {checkpoint.path} has taken {checkpoint.step} steps already, and this run is "
            f"of {settings.steps}. Choose a larger --max_steps to go on."
        )
    return checkpoint
