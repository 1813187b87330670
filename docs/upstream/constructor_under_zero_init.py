# SPDX-License-Identifier: Apache-2.0
"""Transformers: a plain constructor under ``deepspeed.zero.Init`` gives weights that aren't initialised."""

from reproduce import run, weight_of

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}


def check():
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL)
    whole = LlamaForCausalLM(config).model.embed_tokens.weight.std()
    with deepspeed.zero.Init():
        model = LlamaForCausalLM(config)
    partitioned = weight_of(model.model.embed_tokens.weight).std()
    return not 0.5 < float(partitioned / whole) < 2, (
        f"initializer_range is {config.initializer_range}: the embedding's standard deviation is {float(whole):.4f}, "
        f"under zero.Init {float(partitioned):.4f}"
    )


if __name__ == "__main__":
    run(check)
