# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-397B-A17B, the text model, with ZeRO Stage 3 and expert parallelism.

``python recipes/qwen35.py`` trains a scaled-down model of the same architecture, in two processes without a GPU or on
every GPU of this machine, on the Python standard library's own source. ``--size full`` is the true model, ``--size full
--layers 26`` the part of it that was reported.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from shared.recipe import Recipe
from shared.settings import TINY, Settings

MODEL_CLASS = Qwen3_5MoeForCausalLM
LAYERS = 60

# Source: text_config in the config.json of Qwen/Qwen3.5-397B-A17B on the Hugging Face hub; the same in the model's
# arguments of THUDM/slime, scripts/models/qwen3.5-397B-A17B.sh. 172,909,400,064 parameters in the first 26 layers.
# Qwen3_5MoeTextConfig's defaults are those of a smaller model. What Transformers computes without an option: the gate
# on attention's output, the gated shared expert, norms of queries and keys, and norms that scale by 1 + weight.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # Full attention in every fourth layer: 32 heads of 256 over 2 of keys and values; a quarter of each is rotated.
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    # Linear attention (gated delta rule) in the others: 64 heads of values over 16 of queries and keys.
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    # Experts in every layer: 10 of 512, chosen by softmax and normalised, and a shared one with a gate.
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    # Without the auxiliary loss (0.001 in the published config, where it is off too).
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "bos_token_id": None,
    "eos_token_id": 248044,
    "pad_token_id": None,
}
SCALED_DOWN: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {**ARCHITECTURE["rope_parameters"], "mrope_section": [2, 1, 1]},
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
SETTINGS = {
    "tiny": replace(TINY, output=Path("runs/qwen35")),
    # The settings under which the optimizer step was reported, on 4 nodes of 8 H200 and with 26 layers.
    "full": Settings(size="full", output=Path("runs/qwen35"), expert_parallel_size=32, loss_tiles=16),
}


def full_config(layers: int | None = None) -> Qwen3_5MoeTextConfig:
    """The true architecture.

    Args:
        layers: Only its first so many layers; None for all 60.
    """
    return Qwen3_5MoeTextConfig(**ARCHITECTURE, **_layers(layers or LAYERS))


def tiny_config(layers: int | None = None) -> Qwen3_5MoeTextConfig:
    """The same architecture scaled down: both kinds of attention, router, shared expert, in 1.2 million parameters.

    Args:
        layers: Only its first so many layers; None for all 4.
    """
    return Qwen3_5MoeTextConfig(**{**ARCHITECTURE, **SCALED_DOWN}, **_layers(layers or 4))


def _layers(number: int) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(number)]
    return {"num_hidden_layers": number, "layer_types": kinds}


RECIPE = Recipe("Qwen3.5-397B-A17B", MODEL_CLASS, SETTINGS, {"tiny": tiny_config, "full": full_config})

if __name__ == "__main__":
    RECIPE.main()
