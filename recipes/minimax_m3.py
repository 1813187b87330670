# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3, the text model, with ZeRO Stage 3, tensor and expert parallelism, and bf16 masters.

``python recipes/minimax_m3.py`` trains a scaled-down model of the same architecture, in two processes without a GPU or
on every GPU of this machine, on the Python standard library's own source. ``--size full`` is the true model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from shared.recipe import Recipe
from shared.settings import TINY, Settings

MODEL_CLASS = MiniMaxM3VLForCausalLM
LAYERS, DENSE_LAYERS = 60, 3

# Source: text_config in the config.json of MiniMaxAI/MiniMax-M3 on the Hugging Face hub, whose numbers are the defaults
# of MiniMaxM3VLTextConfig in Transformers 5.24, but for the kinds of layers and the share of a head that is rotated
# (rotary_dim of head_dim), which the class leaves to the checkpoint. 426,174,565,632 parameters. Router scores are
# sigmoids with a correction bias, weights are normalised, norms scale by 1 + weight: Transformers has no option for it.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "max_position_embeddings": 524288,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    # Attention: 64 heads of 128 over 4 of keys and values; half of each head is rotated.
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    # Sparse attention: an indexer chooses 16 blocks of 128 keys for each group of heads, the latest one always. No
    # gradient reaches it (a choice has none), and its weights don't change what it chooses by being decayed: queries
    # and keys are normalised, and its norms start at 0.
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    # Three dense layers, then experts: 4 of 128, and a shared one.
    "dense_intermediate_size": 12288,
    "intermediate_size": 3072,
    "shared_intermediate_size": 3072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    # Without the auxiliary loss (0.001 in the published config, where it is off too).
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.0,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "pad_token_id": None,
}
SCALED_DOWN: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 32,
    "index_topk_blocks": 3,
    "dense_intermediate_size": 256,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
SETTINGS = {
    "tiny": replace(TINY, output=Path("runs/minimax_m3")),
    # The settings under which the memory was reported, on 4 nodes of 8 H200.
    "full": Settings(
        size="full",
        output=Path("runs/minimax_m3"),
        tensor_parallel_size=4,
        expert_parallel_size=8,
        bf16_masters=True,
        loss_tiles=16,
    ),
}


def full_config(layers: int | None = None) -> MiniMaxM3VLTextConfig:
    """The true architecture.

    Args:
        layers: Only its first so many layers; None for all 60.
    """
    return MiniMaxM3VLTextConfig(**ARCHITECTURE, **_layers(layers or LAYERS, DENSE_LAYERS))


def tiny_config(layers: int | None = None) -> MiniMaxM3VLTextConfig:
    """The same architecture scaled down: dense and MoE layers, full and sparse attention, in 1.1 million parameters.

    Args:
        layers: Only its first so many layers; None for all 4.
    """
    return MiniMaxM3VLTextConfig(**{**ARCHITECTURE, **SCALED_DOWN}, **_layers(layers or 4, 1))


def _layers(number: int, dense: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": number,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(number)],
        "layer_types": ["full_attention" if layer < dense else "minimax_m3_sparse" for layer in range(number)],
    }


RECIPE = Recipe("MiniMax-M3", MODEL_CLASS, SETTINGS, {"tiny": tiny_config, "full": full_config})

if __name__ == "__main__":
    RECIPE.main()
