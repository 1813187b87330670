# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: AutoEP looks for layer names and ``config`` at the engine's root, so a wrapped model isn't recognised."""

from reproduce import run, zero3

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

SMALL = {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": None,
}


class Wrapper(torch.nn.Module):
    """As a LightningModule or any other training wrapper."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def check():
    seen = {}
    experts = {"enabled": True, "autoep_size": 1, "preset_model": "deepseek_v3"}
    for name, wrap in {"the model": lambda m: m, "a module that holds it": Wrapper}.items():
        try:
            engine = zero3(wrap(Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL))), expert_parallel=experts)
            seen[name] = f"{sum('AutoEP' in type(m).__name__ for m in engine.module.modules())} layer(s) replaced"
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {str(error)[:110]}"
    assert "replaced" in seen["the model"], seen
    return seen["the model"] != seen["a module that holds it"], "; ".join(f"{k}: {v}" for k, v in seen.items())


if __name__ == "__main__":
    run(check)
