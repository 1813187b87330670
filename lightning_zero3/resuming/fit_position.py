# SPDX-License-Identifier: Apache-2.0
"""Where in a fit a checkpoint was saved, and what of the fit's state Lightning doesn't save.

Lightning's checkpoint has counters, and a resume guesses from them where in the loop it was made. Some places look
alike, and what was still to be done there is left out: the validation that was due after the batch, the step of a
``ReduceLROnPlateau``, the end of an epoch. Here the place is written down.

Upstream symbols: the counters and ``_batches_that_stepped`` of ``_FitLoop`` and ``_TrainingEpochLoop``,
``_num_ready_batches_reached``, ``_PrefetchDataFetcher.batches`` (Lightning 2.6.6; read). Detected by tests that compare
with uninterrupted runs. Expires when Lightning's resume does what is left of the batch or the epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any


class Place(Enum):
    """How far the loops were."""

    # The batch was trained on; validation and schedulers that follow it, if any, are still to come.
    BATCH_TRAINED = "batch trained"
    # ... and validated; schedulers are still to come.
    BATCH_VALIDATED = "batch validated"
    # Nothing of the batch is left, and the epoch goes on.
    BATCH_DONE = "batch done"
    # In the hooks of an epoch's end: a scheduler is still to come.
    EPOCH_ENDING = "epoch ending"
    # Between two epochs.
    EPOCH_DONE = "epoch done"
    # In the hooks of an epoch's start.
    EPOCH_STARTING = "epoch starting"
    # Within a batch, before its end.
    ELSEWHERE = "elsewhere"


WITHIN_EPOCH = (Place.BATCH_TRAINED, Place.BATCH_VALIDATED, Place.BATCH_DONE, Place.ELSEWHERE)


def closed_early(trainer: Any) -> bool:
    """Whether an epoch was ended by ``max_steps`` or ``should_stop`` before its batches were through.

    Args:
        trainer: A Trainer in fit, or after it.
    """
    fit_loop = trainer.fit_loop
    epoch = fit_loop.epoch_progress.current
    return bool(
        epoch.ready > 0
        and epoch.processed == epoch.started
        and fit_loop.epoch_loop.batch_progress.current.ready > 0
        and not fit_loop.epoch_loop._num_ready_batches_reached()
    )


def place_of(trainer: Any) -> Place:
    """How far the loops are.

    Args:
        trainer: A Trainer in fit, or after it.
    """
    fit_loop = trainer.fit_loop
    epoch, batch = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress.current
    if closed_early(trainer):
        return Place.BATCH_DONE
    if epoch.ready > epoch.started or (batch.ready == 0 and epoch.processed < epoch.started):
        return Place.EPOCH_STARTING
    if epoch.processed == epoch.started:
        return Place.EPOCH_ENDING if epoch.completed < epoch.processed else Place.EPOCH_DONE
    if trainer.validating:
        validated = fit_loop.epoch_loop.val_loop.batch_progress
        through = validated.is_last_batch and validated.current.completed == validated.current.ready
        return Place.BATCH_VALIDATED if through else Place.BATCH_TRAINED
    if batch.ready == batch.processed:
        return Place.BATCH_TRAINED if batch.completed < batch.processed else Place.BATCH_DONE
    return Place.ELSEWHERE


def reopened(loops: Mapping[str, Any]) -> dict[str, Any]:
    """The loops' state of a fit that closed an epoch early, as it was before: the epoch goes on where it stood.

    Lightning counts such an epoch as a whole one, so that a fit with more steps would go on within the next one, at
    this one's position.

    Args:
        loops: What Lightning saves as ``loops``.
    """
    changed = copy.deepcopy(dict(loops))
    for kind in ("total", "current"):
        epoch = changed["fit_loop"]["epoch_progress"][kind]
        if epoch["completed"] == epoch["processed"]:
            epoch["completed"] -= 1
        epoch["processed"] -= 1
    return changed


def prefetched(trainer: Any) -> bool:
    """Whether a batch was drawn that isn't trained on yet, as Lightning does where a loader has no length.

    Args:
        trainer: A Trainer in fit.
    """
    return bool(getattr(trainer.fit_loop._data_fetcher, "batches", None))
