# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: AutoEP's router multiplies in bf16 where Transformers does it in fp32, so tokens go to other experts."""

from reproduce import run, zero3

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

SMALL = {
    "first_k_dense_replace": 0,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 32,
    "num_attention_heads": 2,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": None,
}
TOKENS = 1000


def check():
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL)).to(torch.bfloat16)
    router = model.model.layers[0].mlp.gate
    torch.nn.init.normal_(router.weight, std=0.02)
    tokens = torch.randn(TOKENS, SMALL["hidden_size"]).to(torch.bfloat16)
    with torch.no_grad():
        logits, *_, chosen = router(tokens)
    engine = zero3(
        model,
        zero={"stage": 0},
        bf16={"enabled": True},
        expert_parallel={"enabled": True, "autoep_size": 1, "preset_model": "deepseek_v3"},
    )
    replaced = engine.module.model.layers[0].mlp.router
    with torch.no_grad():
        logits_of_ep, (_, chosen_by_ep, _) = replaced.gate(tokens), replaced(tokens)[:3]
    others = int((chosen.sort().values != chosen_by_ep.sort().values).any(1).sum())
    return others > 0, (
        f"a GLM router with bf16 weights gives logits of {logits.dtype}, AutoEP's of {logits_of_ep.dtype}: "
        f"{others} of {TOKENS} tokens go to another set of experts"
    )


if __name__ == "__main__":
    run(check)
