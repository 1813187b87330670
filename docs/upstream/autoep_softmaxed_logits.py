# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: AutoEP's Qwen3.5 layers record probabilities, to which Transformers applies a softmax for the loss."""

from reproduce import run, zero3

import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers.utils import output_capturing

SMALL = {
    "head_dim": 16,
    "hidden_size": 32,
    "layer_types": ["full_attention"],
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 64,
}


class EitherKey(type(output_capturing._CAN_RECORD_REGISTRY)):
    """So that AutoEP gets this far: see autoep_output_recorders."""

    def get(self, key, *default):
        return dict.get(self, key, *default) if isinstance(key, str) else super().get(key)

    def __setitem__(self, key, value):
        dict.__setitem__(self, key, value) if isinstance(key, str) else super().__setitem__(key, value)


def check():
    output_capturing._CAN_RECORD_REGISTRY.__class__ = EitherKey
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SMALL))
    torch.nn.init.normal_(model.model.layers[0].mlp.gate.weight)
    tokens = {"input_ids": torch.arange(16).view(1, 16), "output_router_logits": True}
    plain = model(**tokens).aux_loss.item()
    engine = zero3(model, expert_parallel={"enabled": True, "autoep_size": 1, "preset_model": "qwen3_5_moe"})
    seen = engine(**tokens).aux_loss.item()
    return abs(seen - plain) > 1e-4, f"auxiliary loss {plain:.4f} without AutoEP, {seen:.4f} with it"


if __name__ == "__main__":
    run(check)
