# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: under ``zero.Init`` buffers made in fp32 are rounded to the training dtype."""

from reproduce import run

import deepspeed
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def check():
    config = LlamaConfig(**SMALL)
    whole = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    bf16 = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=bf16):
        built = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    off = 4096 * float((built.float() - whole.float()).abs().max())
    return off > 0, (
        f"a Llama's inv_freq is {whole.dtype}, under zero.Init {built.dtype}; at position 4096 angles are off by up to "
        f"{off:.2f} radians"
    )


if __name__ == "__main__":
    run(check)
