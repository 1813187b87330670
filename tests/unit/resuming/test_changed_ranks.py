# SPDX-License-Identifier: Apache-2.0
"""Where an epoch goes on with another number of data-parallel ranks: batches of a rank, for as many samples."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero3.resuming.changed_ranks import moved


def position(lanes: int, batch_size: int, accumulate: int) -> dict[str, int]:
    return {"data_parallel_size": lanes, "batch_size": batch_size, "accumulate": accumulate}


def loops(through: int, earlier: int = 10) -> dict[str, Any]:
    """After an epoch of ``earlier`` batches, within the hooks of the last batch's end."""
    counts = {"ready": through, "started": through, "processed": through, "completed": through - 1}
    total = {name: value + earlier for name, value in counts.items()}
    return {"epoch_loop.batch_progress": {"current": counts, "total": total, "is_last_batch": False}}


@pytest.mark.parametrize(
    ("saved", "here", "through", "expected", "said"),
    [
        # As many samples in a step: the same place.
        (position(4, 2, 1), position(2, 2, 2), 3, 6, "6 batches of a rank here instead of 3."),
        (position(2, 2, 2), position(4, 2, 1), 6, 3, "3 batches of a rank here instead of 6."),
        (position(4, 2, 1), position(2, 4, 1), 3, 3, "3 batches of a rank here instead of 3."),
        # Within a step of 8: its first 4 samples are seen again.
        (position(2, 2, 2), position(4, 2, 1), 5, 2, "its last 4 samples are seen again."),
        # Another step: at one of its beginnings.
        (position(4, 2, 1), position(2, 2, 3), 2, 3, "A step has 12 samples here and had 8 there"),
        (position(4, 2, 1), position(3, 2, 1), 1, 1, "its last 2 samples are seen again"),
        (position(2, 1, 1), position(8, 1, 1), 1, 0, "after 0 batches"),
    ],
)
def test_an_epoch_goes_on_behind_the_same_samples(saved, here, through, expected, said):
    state = loops(through)
    text = moved(state, saved, here)
    progress = state["epoch_loop.batch_progress"]
    assert said in text
    left = through * saved["data_parallel_size"] * saved["batch_size"]
    left -= expected * here["data_parallel_size"] * here["batch_size"]
    assert left >= 0
    assert ("seen again" in text) is (left > 0)
    assert expected % here["accumulate"] == 0
    assert progress["current"] == {
        "ready": expected,
        "started": expected,
        "processed": expected,
        "completed": expected - 1,
    }
    assert progress["total"]["processed"] == 10 + expected
