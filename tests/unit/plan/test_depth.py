# SPDX-License-Identifier: Apache-2.0
"""A whole model's rehearsal from that of its first layers, beside the whole one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zero3.plan.child import Job, find_all
from lightning_zero3.plan.depth import jobs_of, scene_of
from lightning_zero3.plan.estimate import found_or_raise, rehearsed_whole
from lightning_zero3.plan.meter import LOGITS
from lightning_zero3.plan.models import load_model
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import shape_of
from tests.models import tiny


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_tiny_layers(tmp_path, recompute):
    """Twenty layers from eight."""
    tiny("glm", num_hidden_layers=20).save_pretrained(tmp_path)
    sizes = {"sequence_length": 4096, "loss_tiles": 16, "recompute_activations": recompute}
    compare(Setup(model=str(tmp_path), devices=2, expert_parallel_size=2, **sizes), 0.0, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        Setup(recipe="glm45air", nodes=4, expert_parallel_size=8),
        Setup(recipe="qwen35", layers=26, nodes=4, expert_parallel_size=32, loss_tiles=16),
    ],
    ids=lambda setup: setup.recipe,
)
def test_true_layers(setup):
    compare(setup, 0.0, 0.2)


def compare(setup: Setup, below: float, above: float) -> None:
    shape = shape_of(load_model(setup).config)
    scene = scene_of(setup)
    full, *part = found_or_raise(
        find_all([Job(setup=setup, scenes=(scene,)), *jobs_of(setup, len(shape.layer_types), (scene,))])
    )
    (derived,) = rehearsed_whole(shape, full.structure, part, (scene,))
    real = full.rehearsals[0]
    ratio = derived.forward_backward.bytes / real.forward_backward.bytes
    # A tile's logits are known as such.
    assert real.forward_backward.most[LOGITS] >= setup.sequence_length // setup.loss_tiles * shape.vocabulary * 2
    # Never too little, up to the last thousandth.
    assert -below - 1e-3 <= ratio - 1 <= above
    # Stock's step isn't only of its largest sub-group: an estimate.
    assert derived.stock_step.bytes == pytest.approx(real.stock_step.bytes, rel=0.25)
    assert replace(derived, held=real.held).loss_tiles == real.loss_tiles
