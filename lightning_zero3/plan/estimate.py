# SPDX-License-Identifier: Apache-2.0
"""A run's memory: what is held, from its structure; what its steps take, from rehearsals of it or its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_zero3.config import SetupError
from lightning_zero3.plan.child import Found, Job, find_all
from lightning_zero3.plan.depth import jobs_of, scene_of, whole
from lightning_zero3.plan.memory import Memory, memory_of
from lightning_zero3.plan.rehearsal import Rehearsal, Scene
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import Structure

# With which the loss is compared, where it is computed as a whole.
_TILES = 16


def memory_by_part(setup: Setup, shape: Shape) -> tuple[Structure, Memory]:
    """Set a run up, rehearse it, and rehearse its first layers with other recomputation and tiles for comparison.

    Args:
        setup: The run.
        shape: The model's sizes.

    Raises:
        SetupError: It can't be set up.
    """
    scene = scene_of(setup)
    others = (
        replace(scene, recompute_activations=not scene.recompute_activations),
        replace(scene, loss_tiles=1 if scene.loss_tiles > 1 else _tiles(setup)),
    )
    layers = len(shape.layer_types)
    full, *part = found_or_raise(find_all([Job(setup=setup, scenes=(scene,)), *jobs_of(setup, layers, others)]))
    compared = rehearsed_whole(shape, full.structure, part, others)
    return full.structure, memory_of(setup, full.structure, full.rehearsals[0], compared)


def _tiles(setup: Setup) -> int:
    return min(_TILES, setup.sequence_length)


def rehearsed_whole(
    shape: Shape, structure: Structure, part: Sequence[Found], scenes: Sequence[Scene]
) -> list[Rehearsal]:
    """All layers' rehearsals, of those of the first ones.

    Args:
        shape: The model's sizes.
        structure: Of all layers.
        part: What was found for :func:`~lightning_zero3.plan.depth.jobs_of`.
        scenes: What was rehearsed.
    """
    more, *few = part
    return [
        whole(
            shape,
            structure,
            more.structure,
            scene,
            more.rehearsals[number],
            few[0].rehearsals[number] if few and not scene.recompute_activations else None,
        )
        for number, scene in enumerate(scenes)
    ]


def found_or_raise(answers: Sequence[Found | SetupError]) -> list[Found]:
    """Answers of which each is needed.

    Args:
        answers: Of :func:`~lightning_zero3.plan.child.find_all`.

    Raises:
        SetupError: The first one that there is among them.
    """
    for each in answers:
        if isinstance(each, SetupError):
            raise each
    return [each for each in answers if isinstance(each, Found)]
