"""Every YAML file that is shipped: it loads, and what it asks for can be set up on as many ranks as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero3.topology import Topology
from shared import preflight
from shared.run import make_strategy
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


@pytest.mark.parametrize("name", EXPECTED)
def test_it_loads_and_can_be_set_up(name):
    (module,) = (module for recipe, module in RECIPES.items() if name.startswith(recipe))
    ranks, parameters, experts, tensors, length = EXPECTED[name]
    settings = module.RECIPE.parse(["--config", str(CONFIGS / f"{name}.yaml")])
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
