# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5-Air with ZeRO Stage 3 and expert parallelism.

``python recipes/glm45air.py`` trains a scaled-down model of the same architecture, in two processes without a GPU or
on every GPU of this machine, on the Python standard library's own source. ``--size full`` is the true model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from shared.recipe import Recipe
from shared.settings import TINY, Settings

MODEL_CLASS = Glm4MoeForCausalLM

# Source: config.json of zai-org/GLM-4.5-Air on the Hugging Face hub; the same in the model's arguments of THUDM/slime,
# scripts/models/glm4.5-106B-A12B.sh. 106,852,245,504 parameters. Glm4MoeConfig's defaults differ in attention_bias,
# head_dim and rope_theta.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # Attention: 96 heads of 128 over 8 of keys and values, biased, without norms; half of each head is rotated.
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "use_qk_norm": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    # One dense layer, then 45 of experts: 8 of 128, chosen by sigmoid scores and a correction bias, and a shared one.
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "output_router_logits": False,
    # Built by nobody in training: the layer that predicts a second token, which Transformers leaves out.
    "num_mtp_layers": 1,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
SCALED_DOWN: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}
SETTINGS = {
    "tiny": replace(TINY, output=Path("runs/glm45air")),
    # The settings under which the optimizer step was reported, on 4 nodes of 8 H200.
    "full": Settings(size="full", output=Path("runs/glm45air"), attention="cudnn", expert_parallel_size=8),
}


def full_config(layers: int | None = None) -> Glm4MoeConfig:
    """The true architecture.

    Args:
        layers: Only its first so many layers; None for all 46.
    """
    return Glm4MoeConfig(**{**ARCHITECTURE, "num_hidden_layers": layers or ARCHITECTURE["num_hidden_layers"]})


def tiny_config(layers: int | None = None) -> Glm4MoeConfig:
    """The same architecture scaled down: every kind of layer, router and bias, in 1.0 million parameters.

    Args:
        layers: Only its first so many layers; None for all 4.
    """
    fields = {**ARCHITECTURE, **SCALED_DOWN}
    return Glm4MoeConfig(**{**fields, "num_hidden_layers": layers or fields["num_hidden_layers"]})


RECIPE = Recipe("GLM-4.5-Air", MODEL_CLASS, SETTINGS, {"tiny": tiny_config, "full": full_config})

if __name__ == "__main__":
    RECIPE.main()
