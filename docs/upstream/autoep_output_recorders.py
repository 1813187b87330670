# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: AutoEP's presets for Mixtral, Qwen and MiniMax treat Transformers' output registry as a plain dict.

Since Transformers 5.23 its ``get`` takes the model and no default.
"""

from reproduce import run, zero3

from transformers import MixtralConfig, MixtralForCausalLM

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "vocab_size": 64,
}


def check():
    experts = {"enabled": True, "autoep_size": 1, "preset_model": "mixtral"}
    try:
        zero3(MixtralForCausalLM(MixtralConfig(**SMALL)), expert_parallel=experts)
    except Exception as error:
        return True, f"deepspeed.initialize with the preset mixtral raises {type(error).__name__}: {error}"
    return False, "deepspeed.initialize with the preset mixtral works"


if __name__ == "__main__":
    run(check)
