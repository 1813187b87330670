# SPDX-License-Identifier: Apache-2.0
"""The largest sequence length that fits on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_zero3.gpus import Gpu
from lightning_zero3.plan.child import find_all, find_structure
from lightning_zero3.plan.depth import jobs_of, scene_of
from lightning_zero3.plan.estimate import found_or_raise, rehearsed_whole
from lightning_zero3.plan.memory import GIB, memory_of
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import Structure

# Lengths are multiples of it: tiles of attention kernels, and of MiniMax-M3's sparse attention, are no larger.
BLOCK = 128
_LENGTHS = tuple(1 << power for power in range(10, 22, 2))
_ROUNDS = 3


def longest_that_fits(setup: Setup, shape: Shape, gpu: Gpu) -> dict[str, Any]:
    """Rehearse the first layers at a few lengths, and draw straight lines between them.

    Memory is a sum and a maximum of what grows with the tokens and with their square, so a straight line between two
    lengths is never below it: what is found fits. Further rounds with lengths around the answer narrow it.

    Args:
        setup: The run; its own length doesn't matter.
        shape: The model's sizes.
        gpu: The GPU.

    Returns:
        ``longest_sequence_length``, None where even the shortest doesn't fit, and ``memory_by_sequence_length``: the
        totals in GiB that were computed.

    Raises:
        SetupError: The run can't be set up.
    """
    structure = find_structure(setup)
    totals = _totals(setup, shape, structure, _LENGTHS)
    capacity = int(gpu.memory_gib * GIB)
    best = longest_within(totals, capacity)
    for _ in range(_ROUNDS):
        # Straight lines overestimate: nearer ones say more.
        closer = _closer(totals, best)
        if not closer:
            break
        totals |= _totals(setup, shape, structure, closer)
        before, best = best, longest_within(totals, capacity)
        if best == before:
            break
    return {
        "longest_sequence_length": best,
        "memory_by_sequence_length": {str(length): round(size / GIB, 3) for length, size in sorted(totals.items())},
    }


def _closer(totals: Mapping[int, int], best: int | None) -> tuple[int, ...]:
    """Lengths to be rehearsed next: the answer so far, the next block, and halfway to what is known not to fit."""
    if best is None:
        return ()
    above = min((length for length in totals if length > best), default=None)
    if above is None:
        return ()
    wanted = {best, best + BLOCK, (best + above) // 2 // BLOCK * BLOCK}
    return tuple(sorted(wanted - set(totals)))


def longest_within(totals: Mapping[int, int], capacity: int) -> int | None:
    """The largest multiple of :data:`BLOCK` whose memory, on straight lines between known ones, fits.

    Args:
        totals: Bytes by length.
        capacity: Bytes.

    >>> longest_within({1024: 100, 2048: 200}, 150)
    1536
    >>> longest_within({1024: 100, 2048: 200}, 99) is None
    True
    """
    lengths = sorted(totals)
    if totals[lengths[0]] > capacity:
        return None
    above = next((length for length in lengths if totals[length] > capacity), None)
    if above is None:
        return lengths[-1]
    below = lengths[lengths.index(above) - 1]
    fits = below + (capacity - totals[below]) * (above - below) // (totals[above] - totals[below])
    return fits // BLOCK * BLOCK


def _totals(setup: Setup, shape: Shape, structure: Structure, lengths: tuple[int, ...]) -> dict[int, int]:
    scenes = tuple(replace(scene_of(setup), sequence_length=length) for length in lengths)
    part = found_or_raise(find_all(jobs_of(setup, len(shape.layer_types), scenes)))
    rehearsals = rehearsed_whole(shape, structure, part, scenes)
    return {
        length: memory_of(setup, structure, rehearsal).total
        for length, rehearsal in zip(lengths, rehearsals, strict=True)
    }
