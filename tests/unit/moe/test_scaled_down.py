# SPDX-License-Identifier: Apache-2.0
"""Small copies of models at their real sizes, with weights on the meta device: shapes and configs are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero3.moe.scaled_down import UnscalableModelError, scaled_down
from lightning_zero3.topology import Topology
from tests.models import COMPOSITES, FAMILIES, build, tiny

# What the published models' configs have beside their classes' defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm": {"attention_bias": True, "head_dim": 128},
    "minimax": {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    },
    "qwen3": {"decoder_sparse_step": 2, "head_dim": 128},
}


def full_size(family: str, **fields: Any) -> nn.Module:
    config_class, model_class, _ = FAMILIES[family]
    with torch.device("meta"):
        return model_class(config_class(**{**PUBLISHED.get(family, {}), **fields}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [Topology(1), Topology(64, 8, 2), Topology(64, 8, 1)], ids=str)
def test_a_published_model_becomes_small_and_keeps_what_decides(family, layout):
    model = full_size(family)
    config, small = model.config, scaled_down(model, layout)
    assert type(small) is type(config)
    experts = getattr(small, "n_routed_experts", None) or small.num_experts
    assert experts % layout.expert_parallel_size == 0
    assert experts >= small.num_experts_per_tok == config.num_experts_per_tok
    assert small.num_attention_heads % layout.tensor_parallel_size == 0
    assert small.num_key_value_heads % layout.tensor_parallel_size == 0
    for name in ("norm_topk_prob", "routed_scaling_factor", "tie_word_embeddings", "hidden_act", "rope_parameters"):
        assert getattr(small, name, None) == getattr(config, name, None)
    with torch.device("meta"):
        copy = type(model)(small)
    assert sum(parameter.numel() for parameter in copy.parameters()) < 5_000_000
    # Every class of module, down to norms and routers, and nothing else.
    assert {type(module) for module in copy.modules()} == {type(module) for module in model.modules()}
    assert config.num_hidden_layers > 20  # the model's own is left alone


def test_layers_of_every_kind_are_kept():
    small = scaled_down(full_size("minimax"), Topology(1))
    assert small.mlp_layer_types == ["dense", "dense", "sparse", "sparse"]
    assert small.layer_types == ["full_attention"] * 2 + ["minimax_m3_sparse"] * 2
    assert scaled_down(full_size("glm"), Topology(1)).first_k_dense_replace == 1
    small = scaled_down(full_size("qwen3"), Topology(1))
    assert (small.num_hidden_layers, small.mlp_only_layers, small.decoder_sparse_step) == (4, [0, 2], 1)


def test_groups_of_experts_have_room_for_the_choice():
    small = scaled_down(full_size("glm", n_group=8, topk_group=4), Topology(1))
    assert small.n_routed_experts % 8 == 0
    assert small.n_routed_experts // 8 * 4 >= small.num_experts_per_tok


def test_a_layer_that_the_config_does_not_build():
    model = build(tiny("mixtral"))
    model.model.layers[1].mlp = nn.Linear(32, 32)
    with pytest.raises(UnscalableModelError, match=r"Layer 1 of MixtralForCausalLM .*leave verify_parallel out"):
        scaled_down(model, Topology(1))


@pytest.mark.parametrize(
    ("family", "where", "name", "value", "number"),
    [
        ("glm", "mlp", "routed_scaling_factor", 7.5, "1"),
        ("mixtral", "mlp.gate", "top_k", 1, "0"),
        ("qwen3", "mlp.gate", "norm_topk_prob", "other", "0"),
    ],
)
def test_a_setting_that_was_changed_after_the_config(family, where, name, value, number):
    # AutoEP goes by the config, and so would the copy: it would pass, and the run train another function.
    model = build(tiny(family))
    changed = model.model.layers[int(number)].get_submodule(where)
    setattr(changed, name, not getattr(changed, name) if value == "other" else value)
    with pytest.raises(UnscalableModelError, match=rf"{name} is .* in the model, and .* by its config"):
        scaled_down(model, Topology(1))


def test_a_model_of_several_models():
    config_class, model_class, _ = COMPOSITES["qwen3_5"]
    with torch.device("meta"):
        model = model_class(config_class())
    with pytest.raises(UnscalableModelError, match="made of several models"):
        scaled_down(model, Topology(1))


def test_a_width_that_is_not_known():
    class Wide(FAMILIES["mixtral"][1]):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.memory = nn.Embedding(config.memory_slots, 1000)

    with torch.device("meta"):
        model = Wide(tiny("mixtral", memory_slots=60_000))
    with pytest.raises(UnscalableModelError, match=r"still have 60,\d+,\d+ parameters; memory.weight"):
        scaled_down(model, Topology(1))
