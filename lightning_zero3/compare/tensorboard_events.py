# SPDX-License-Identifier: Apache-2.0
"""Scalars of TensorBoard's event files."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_zero3.config import SetupError

_NOT_METRICS = frozenset({"epoch", "hp_metric"})


def is_file(path: Path) -> bool:
    """Whether a path is an event file, by its name.

    >>> is_file(Path("runs/version_0/events.out.tfevents.1"))
    True
    """
    return path.name.startswith("events.out.tfevents.")


def in_folder(folder: Path) -> bool:
    """Whether a folder holds event files.

    Args:
        folder: It needn't exist.
    """
    return folder.is_dir() and any(map(is_file, folder.iterdir()))


def read(path: Path) -> dict[str, dict[int, float]]:
    """All scalars of a run. Where a run was resumed into the same folder, the later values count.

    Args:
        path: An event file, or the folder of a run's.

    Returns:
        Name → {step: value}; values have 32 bits.

    Raises:
        SetupError: There is no TensorBoard.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ModuleNotFoundError as error:
        raise SetupError(f"{path}: event files are read by TensorBoard: pip install tensorboard") from error
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    accumulator = EventAccumulator(str(path), size_guidance={SCALARS: 0})  # all, not a sample of them
    accumulator.Reload()
    return {
        name: dict(sorted((event.step, float(event.value)) for event in accumulator.Scalars(name)))
        for name in accumulator.Tags()[SCALARS]
        if name not in _NOT_METRICS
    }
