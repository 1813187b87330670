# SPDX-License-Identifier: Apache-2.0
"""The recipes' true architectures, on the meta device, and that the tiny ones leave out no kind of anything."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from lightning_zero3.config import SetupError
from tests.recipes.recipes import RECIPES, meta_model

COUNTS = [
    ("glm45air", None, 106_852_245_504),
    ("glm45air", 4, 8_509_550_592),
    ("qwen35", None, 396_346_350_336),
    ("qwen35", 26, 172_909_400_064),
    ("minimax_m3", None, 426_174_565_632),
    ("minimax_m3", 4, 10_874_838_272),
]
# What a config class declares that is no part of an architecture, or is made from the number of layers.
NO_HYPERPARAMETERS = {"use_cache", "base_config_key", "layer_types", "mlp_layer_types", "num_hidden_layers"}
# Sizes: what scaling down may change. Everything else decides what is computed.
SIZES = re.compile(
    r"(vocab|hidden|intermediate|index_block)_size|\w+_intermediate_size|max_position_embeddings|\w*head_dim|rotary_dim|"
    r"num_\w+|linear_num_\w+|index_(n_heads|topk_blocks)|n_routed_experts|rope_parameters|\w+_token_id"
)

each_recipe = pytest.mark.parametrize("module", RECIPES.values(), ids=RECIPES)


@pytest.mark.parametrize(("name", "layers", "parameters"), COUNTS)
def test_the_full_size_has_the_published_number_of_parameters(name, layers, parameters):
    module = RECIPES[name]
    model = meta_model(module, module.full_config(layers))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_layers_of_the_full_sizes():
    glm, qwen, minimax = (RECIPES[name].full_config() for name in ("glm45air", "qwen35", "minimax_m3"))
    assert (glm.num_hidden_layers, glm.first_k_dense_replace) == (46, 1)
    assert (glm.n_routed_experts, glm.num_experts_per_tok, glm.n_shared_experts) == (128, 8, 1)
    assert qwen.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 15
    assert (qwen.num_experts, qwen.num_experts_per_tok) == (512, 10)
    assert minimax.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 57
    assert minimax.layer_types == ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    assert (minimax.num_local_experts, minimax.num_experts_per_tok) == (128, 4)


def test_rotary_embeddings_are_the_published_ones_not_the_config_classes():
    expected = {"glm45air": (1e6, 0.5), "qwen35": (1e7, 0.25), "minimax_m3": (5e6, 0.5)}
    for name, (theta, share) in expected.items():
        rope = RECIPES[name].full_config().rope_parameters
        assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (theta, share), name
        # The model takes them: as many frequencies as half of the rotated channels.
        model = RECIPES[name].MODEL_CLASS(RECIPES[name].tiny_config(2))
        config = model.config
        assert len(model.model.rotary_emb.inv_freq) == config.head_dim * share / 2, name
        assert getattr(config, "rotary_dim", config.head_dim * share) == config.head_dim * share, name


@each_recipe
def test_no_hyperparameter_is_left_to_the_config_classs_defaults(module):
    declared = set(type(module.full_config()).__annotations__)
    class_level = {name for name in declared if name.startswith(("base_model_", "attribute_map", "default_"))}
    assert declared - class_level - NO_HYPERPARAMETERS - set(module.ARCHITECTURE) == set()
    config = module.full_config()
    for name, value in module.ARCHITECTURE.items():
        found = getattr(config, name)
        assert found == value or name == "num_hidden_layers", (name, found, value)


@each_recipe
def test_the_tiny_size_keeps_every_kind_of_layer_and_every_flag(module):
    assert kinds(module, module.tiny_config()) == kinds(module, module.full_config())
    assert [name for name in module.SCALED_DOWN if not SIZES.fullmatch(name)] == []
    tiny, full = module.tiny_config(), module.full_config()
    assert pairs_of_layers(tiny) == pairs_of_layers(full)
    for name in ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_interleaved"):
        assert tiny.rope_parameters.get(name) == full.rope_parameters.get(name), name
    # Groups: fewer keys than queries, fewer experts chosen than there are.
    for config in (tiny, full):
        assert config.num_attention_heads > config.num_key_value_heads > 1
        assert config.num_experts_per_tok > 1


def test_tiny_sparse_attention_leaves_something_out():
    tiny, settings = RECIPES["minimax_m3"].tiny_config(), RECIPES["minimax_m3"].SETTINGS["tiny"]
    assert tiny.index_topk_blocks * tiny.index_block_size < settings.sequence_length
    assert tiny.index_n_heads == tiny.num_key_value_heads


@each_recipe
def test_the_full_size_has_the_reports_settings(module):
    settings = module.SETTINGS["full"]
    assert (settings.micro_batch_size, settings.sequence_length) == (1, 8192)
    assert settings.recompute_activations
    assert settings.precision == "bf16-mixed"
    assert settings.optimizer == "deepspeed"
    expected: dict[str, dict[str, Any]] = {
        "glm45air": {"expert_parallel_size": 8, "attention": "cudnn", "bf16_masters": False},
        "qwen35": {"expert_parallel_size": 32, "loss_tiles": 16, "bf16_masters": False},
        "minimax_m3": {"expert_parallel_size": 8, "tensor_parallel_size": 4, "bf16_masters": True},
    }
    for name, value in expected[module.__name__].items():
        assert getattr(settings, name) == value, name


@each_recipe
def test_layers_are_the_first_ones(module):
    recipe = module.RECIPE
    settings = recipe.parse(["--size", "full", "--layers", "5"])
    assert recipe.config(settings).num_hidden_layers == 5
    with pytest.raises(SetupError, match=r"--layers 5: .* \(tiny\) has 4"):
        recipe.config(recipe.parse(["--layers", "5"]))


def kinds(module: ModuleType, config: Any) -> tuple[set[tuple[str, str]], set[str]]:
    """Names without numbers of all modules with their classes, and of all parameters and buffers."""
    model = meta_model(module, config)
    strip = re.compile(r"\.\d+(?=\.|$)")
    modules = {(strip.sub("", name), type(part).__name__) for name, part in model.named_modules()}
    tensors = {strip.sub("", name) for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return modules, tensors


def pairs_of_layers(config: Any) -> set[tuple[str | None, str | None]]:
    """Which kinds of attention go with which kinds of MLP."""
    nothing = [None] * config.num_hidden_layers
    attention, mlp = (getattr(config, name, None) or nothing for name in ("layer_types", "mlp_layer_types"))
    return set(zip(attention, mlp, strict=True))
