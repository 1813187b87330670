# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: where dense and expert parameters alternate, each change flushes the reduction bucket (a cost).

There is one bucket per dtype; two process groups take turns in it.
"""

from reproduce import run, zero3

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

LAYERS = 6
SMALL = {
    "first_k_dense_replace": 0,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": None,
}


def check():
    from deepspeed.runtime.zero import stage3

    experts = {"enabled": True, "autoep_size": 2, "preset_model": "deepseek_v3"}
    engine = zero3(Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL)), expert_parallel=experts)
    reductions, reduce = [], stage3.reduce_scatter_coalesced

    def counted(tensors, group=None):
        reductions.append(len(tensors))
        return reduce(tensors, group)

    stage3.reduce_scatter_coalesced = counted
    ids = torch.arange(16).view(1, 16)
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    elements = sum(p.ds_numel for p in engine.module.parameters())
    bucket = engine.optimizer.reduce_bucket_size
    return len(reductions) > LAYERS, (
        f"{LAYERS} MoE layers, {elements} elements in all, a bucket of {bucket}: a backward makes {len(reductions)} "
        "reduce-scatters; 2 process groups need 2"
    )


if __name__ == "__main__":
    run(check, processes=2)
