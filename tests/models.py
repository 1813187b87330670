"""Tiny Hugging Face models, built from their configs alone: every kind of layer that the full ones have, in seconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM


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
