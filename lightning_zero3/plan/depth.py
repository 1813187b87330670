# SPDX-License-Identifier: Apache-2.0
"""A whole model's first steps from those of its first layers.

A rehearsal of eight layers takes seconds, one of sixty half a minute. What a layer needs while it is computed doesn't
depend on how many there are; what is kept of each until backward does. With recomputation that is its input, so a
peak grows by one input per layer. Where the peak isn't in the last layers' backward (a gather, the logits), it grows by
less: then the figure is too high, by one input per layer at most.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_zero3.plan.child import Job
from lightning_zero3.plan.meter import ACTIVATIONS
from lightning_zero3.plan.rehearsal import Peak, Rehearsal, Scene
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import ELEMENT_BYTES, Structure

# Every kind of layer of the recipes' models is among the first four (MiniMax-M3 has three dense ones first). Without
# recomputation, how much each keeps is told by two depths that are some periods of kinds apart.
FEW, MORE = 4, 8


def scene_of(setup: Setup) -> Scene:
    """How a setup's steps are rehearsed.

    Args:
        setup: The run.
    """
    return Scene(
        sequence_length=setup.sequence_length,
        micro_batch_size=setup.micro_batch_size,
        recompute_activations=setup.recompute_activations,
        loss_tiles=setup.loss_tiles,
        block_sparse_kernel=setup.block_sparse_kernel,
        optimizer="fused" if setup.optimizer == "deepspeed" else "foreach",
    )


def jobs_of(setup: Setup, layers: int, scenes: tuple[Scene, ...]) -> tuple[Job, ...]:
    """The rehearsals of a setup's first layers, and of fewer where two depths are needed.

    Args:
        setup: The run.
        layers: Of the whole model.
        scenes: What is rehearsed.
    """
    kept = any(not scene.recompute_activations for scene in scenes)
    depths = (MORE, FEW) if kept and layers > FEW else (MORE,)
    return tuple(Job(setup=replace(setup, layers=min(layers, depth)), scenes=scenes) for depth in depths)


def whole(
    shape: Shape,
    structure: Structure,
    part: Structure,
    scene: Scene,
    more: Rehearsal,
    few: Rehearsal | None = None,
) -> Rehearsal:
    """The rehearsal of all layers.

    Args:
        shape: The whole model's sizes.
        structure: The whole model's.
        part: That of the first layers.
        scene: What was rehearsed.
        more: Of the first layers.
        few: Of fewer of them; needed without recomputation.
    """
    layers = len(shape.layer_types)
    missing = max(0, layers - MORE)
    tokens = scene.sequence_length * scene.micro_batch_size
    kept = tokens * shape.hidden * ELEMENT_BYTES[structure.dtypes.weights]
    if few is not None:
        grown = more.forward_backward.bytes - few.forward_backward.bytes
        kept = max(kept, -(-grown // (min(layers, MORE) - FEW)))
    steps = max(structure.sub_groups) / max(part.sub_groups)
    return replace(
        more,
        held=None,
        forward_backward=_deeper(more.forward_backward, missing * kept),
        step=_scaled(more.step, steps),
        stock_step=_scaled(more.stock_step, steps),
    )


def _deeper(peak: Peak, size: int) -> Peak:
    def added(by_kind: dict[str, int]) -> dict[str, int]:
        return {**by_kind, ACTIVATIONS: by_kind.get(ACTIVATIONS, 0) + size}

    return Peak(bytes=peak.bytes + size, by_kind=added(dict(peak.by_kind)), most=added(dict(peak.most)))


def _scaled(peak: Peak, by: float) -> Peak:
    """A step's own memory is for its largest sub-group."""
    return Peak(
        bytes=int(peak.bytes * by),
        by_kind={kind: int(size * by) for kind, size in peak.by_kind.items()},
        most={kind: int(size * by) for kind, size in peak.most.items()},
    )
