# SPDX-License-Identifier: Apache-2.0
"""A run that its GPUs can't hold is refused by a plan of it, before anything is started."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_zero3.config import SetupError
from lightning_zero3.plan.memory import Memory
from lightning_zero3.recipe_files import load_recipe
from shared.gpu_memory import check_gpu_memory, planned_memory, refuse_what_does_not_fit
from shared.run import train

GIB = 2**30


@pytest.fixture(scope="module")
def two_layers() -> Memory:
    """Of GLM-4.5-Air's first two layers, of which one has experts, on 8 GPUs."""
    recipe = load_recipe("glm45air").RECIPE
    settings = replace(recipe.settings["full"], layers=2, num_nodes=1)
    return planned_memory(settings, recipe.config(settings), ranks=8, expert_parallel_size=8)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_its_parts_and_a_way_out(two_layers):
    with pytest.raises(
        SetupError, match=r"needs .* GiB of each GPU, and this machine's have 5\.0: .*--check_memory false"
    ):
        refuse_what_does_not_fit(two_layers, 5 * GIB)
    refuse_what_does_not_fit(two_layers, two_layers.total)


@pytest.mark.slow
def test_between_steps_a_gpu_has_its_share_and_the_bucket(two_layers):
    """2 bytes of weights, 2 of gradients, 12 of masters and moments, 5·10^8 elements of bucket."""
    recipe = load_recipe("glm45air").RECIPE
    with torch.device("meta"):
        model = recipe.model_class(recipe.configs["full"](2))
    share = sum(parameter.numel() for parameter in model.parameters()) / 8
    assert two_layers.between_steps == pytest.approx(16 * share + 2 * 5e8, rel=1e-3)
    assert two_layers.total > two_layers.peak > two_layers.between_steps


def test_nothing_is_planned_without_a_gpu(monkeypatch):
    recipe: Any = load_recipe("glm45air").RECIPE
    settings = recipe.settings["full"]
    monkeypatch.setattr("shared.gpu_memory.planned_memory", lambda *_, **__: pytest.fail("planned"))
    check_gpu_memory(settings, recipe.config(settings), ranks=32, expert_parallel_size=8)


@pytest.mark.parametrize("wrong", [("--data", "no/such/file"), ("--resume", "no/such/checkpoint")])
def test_nothing_is_planned_before_what_costs_less_is_checked(monkeypatch, tmp_path, wrong):
    recipe = load_recipe("glm45air").RECIPE
    monkeypatch.setattr("shared.gpu_memory.check_gpu_memory", lambda *_, **__: pytest.fail("planned"))
    with pytest.raises(SetupError, match=wrong[1]):
        train(recipe, recipe.parse(["--output", str(tmp_path), "--max_tokens", "10000", *wrong]))
