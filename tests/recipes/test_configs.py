# SPDX-License-Identifier: Apache-2.0
"""Every YAML file that is shipped: it loads, and what it asks for can be set up on as many ranks as it says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names

from lightning_zero3.plan.child import find_structure
from lightning_zero3.topology import Topology
from shared import gpu_memory, preflight
from shared.run import make_strategy
from shared.settings import Settings
from tests.recipes.recipes import RECIPES, meta_model

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
# Ranks, parameters (None: not of interest), expert and tensor parallel size, tokens of a sample.
EXPECTED = {
    "glm45air_tiny": (2, None, 2, None, 256),
    "glm45air_4x8": (32, 106_852_245_504, 8, None, 8192),
    "qwen35_tiny": (2, None, 2, None, 256),
    "qwen35_26_layers_4x8": (32, 172_909_400_064, 32, None, 8192),
    "minimax_m3_tiny": (2, None, 2, None, 256),
    "minimax_m3_4x8": (32, 426_174_565_632, 8, 4, 8192),
    "minimax_m3_16k": (32, 426_174_565_632, 8, 4, 16384),
    "minimax_m3_4_layers_2gpu": (2, 10_874_838_272, 2, None, 4096),
}


def test_there_is_one_for_each_published_setting():
    assert {path.stem for path in CONFIGS.iterdir()} == set(EXPECTED)


def asked_for(name: str) -> tuple[ModuleType, Settings]:
    """A file's recipe, and its settings."""
    (module,) = (module for recipe, module in RECIPES.items() if name.startswith(recipe))
    return module, module.RECIPE.parse(["--config", str(CONFIGS / f"{name}.yaml")])


@pytest.mark.parametrize("name", EXPECTED)
def test_it_loads_and_can_be_set_up(name):
    module, settings = asked_for(name)
    ranks, parameters, experts, tensors, length = EXPECTED[name]
    if settings.size == "full":
        assert (settings.devices or 0) * settings.num_nodes == ranks
        assert settings.benchmark
    config = module.RECIPE.config(settings)
    assert preflight.expert_parallel_size(settings, config, ranks) == experts
    assert (settings.tensor_parallel_size, settings.sequence_length) == (tensors, length)
    assert length <= config.max_position_embeddings
    assert Topology(ranks, experts, tensors or 1).data_parallel_size > 0
    strategy = make_strategy(settings, expert_parallel_size=experts)
    preflight.check_model(module.MODEL_CLASS, config, strategy, ranks)
    if parameters is not None:
        model = meta_model(module, config)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters


# Sub-groups and parameters that the plan must find, as reported or as found by DeepSpeed's own set-up.
PLANNED = {
    "glm45air_4x8": (137, 735),
    "qwen35_26_layers_4x8": (41, 479),
    "minimax_m3_4x8": (173, 1059),
    "minimax_m3_16k": (173, 1059),
    "minimax_m3_4_layers_2gpu": (6, 51),
}
_AT_ONCE = ("glm45air_tiny",)


@pytest.mark.parametrize(
    "name", [*_AT_ONCE, *(pytest.param(n, marks=pytest.mark.slow) for n in EXPECTED if n not in _AT_ONCE)]
)
def test_it_can_be_planned(name, tmp_path):
    if name.startswith("minimax") and "minimax_m3" not in available_preset_names():
        pytest.skip("the installed DeepSpeed has no preset for it")
    module, settings = asked_for(name)
    ranks, parameters, experts, _, _ = EXPECTED[name]
    config = module.RECIPE.config(settings)
    setup = gpu_memory.setup_of(settings, config, str(tmp_path), ranks=ranks, expert_parallel_size=experts)
    structure = find_structure(setup)
    if parameters is not None:
        assert structure.model_parameters == parameters
        assert (len(structure.sub_groups), len(structure.trained)) == PLANNED[name]
