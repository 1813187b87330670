# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models, built from their configs alone: every kind of layer that the full ones have, in seconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)

from lightning_zero3.moe.scaled_down import build_random

# What all of them have in common. Ten times Transformers' own initialisation: what one layer does must be visible in
# the logits of so small a model.
_SMALL: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 16,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "use_cache": False,
    "vocab_size": 64,
}
# One of each kind of layer that the full model has, 8 experts, and whatever else could be lost on the way.
FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    # A dense layer first, group-limited routing, a scaling factor, a shared expert, a correction bias.
    "glm": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "n_routed_experts": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    # Linear and full attention, a gated shared expert.
    "qwen3_5": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "moe_intermediate_size": 16,
            "num_attention_heads": 4,
            "num_experts": 8,
            "num_hidden_layers": 2,
            "shared_expert_intermediate_size": 24,
        },
    ),
    # A dense layer with full attention, then sparse attention; clamped activation, scaling, correction bias.
    "minimax": (
        MiniMaxM3VLTextConfig,
        MiniMaxM3VLForCausalLM,
        {
            "dense_intermediate_size": 64,
            "index_block_size": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk_blocks": 2,
            "intermediate_size": 16,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_local_experts": 8,
            "rotary_dim": 8,
            "routed_scaling_factor": 2.0,
            "shared_intermediate_size": 24,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "num_local_experts": 8},
    ),
    # A dense layer last, weights that aren't normalised.
    "qwen3": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "intermediate_size": 64,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "num_attention_heads": 4,
            "num_experts": 8,
            "num_hidden_layers": 3,
        },
    ),
}

# Text and vision: each holds a family's text model, at another depth and under other names, as `text_config`.
COMPOSITES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3_5": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        {
            "image_token_id": 61,
            "video_token_id": 62,
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "num_position_embeddings": 16,
                "out_hidden_size": 32,
                "patch_size": 4,
            },
            "vision_end_token_id": 60,
            "vision_start_token_id": 63,
        },
    ),
    "minimax": (
        MiniMaxM3VLConfig,
        MiniMaxM3SparseForConditionalGeneration,
        {
            "image_token_index": 61,
            "video_token_index": 62,
            "vision_config": {
                "hidden_size": 16,
                "image_size": 28,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 14,
            },
        },
    ),
}


def tiny_composite(family: str) -> PretrainedConfig:
    """The config of a tiny model of text and vision.

    Args:
        family: A name in :data:`COMPOSITES`.
    """
    config_class, _, fields = COMPOSITES[family]
    config = config_class(text_config=tiny(family).to_dict(), **fields)
    config._attn_implementation = "eager"
    return config


def tiny(family: str, **overrides: Any) -> PretrainedConfig:
    """The config of a tiny model of one of :data:`FAMILIES`.

    Args:
        family: A name there.
        **overrides: Any fields of its config.
    """
    config_class, _, fields = FAMILIES[family]
    config = config_class(**{**_SMALL, **fields, **overrides})
    config._attn_implementation = "eager"
    return config


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model in which nothing is at a value where losing it would change nothing.

    Args:
        config: See :func:`tiny`.
        seed: The same seed gives the same values.
    """
    (model_class,) = (each for kind, each, _ in (*FAMILIES.values(), *COMPOSITES.values()) if kind is type(config))
    with torch.random.fork_rng(devices=[]):
        return build_random(model_class, config, seed)


def tiny_glm(**overrides: Any) -> Glm4MoeConfig:
    """The config of a GLM-4 MoE with one dense and one MoE layer, 4 routed experts and a shared one.

    Args:
        **overrides: Any fields of ``Glm4MoeConfig``.
    """
    fields: dict[str, Any] = {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "hidden_size": 32,
        # Ten times Transformers' own: what one layer does must be visible in the logits of so small a model.
        "initializer_range": 0.2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return Glm4MoeConfig(**{**fields, **overrides})


def build_glm(config: Glm4MoeConfig, seed: int = 0) -> Glm4MoeForCausalLM:
    """A GLM-4 MoE with random weights; the caller's random state is left as it was.

    Transformers starts the score correction bias at zero, where losing it changes nothing. Here it is random, and large
    enough to change which experts are chosen.

    Args:
        config: See :func:`tiny_glm`.
        seed: The same seed gives the same values.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Glm4MoeForCausalLM(config)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.weight.normal_(std=0.5)
                module.e_score_correction_bias.uniform_(-0.5, 0.5)
    return model
