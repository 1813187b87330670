# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a model, against a count by hand, and against torch's own counter of what was really run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from lightning_zero3.flops import Attention, ModelFlops, UnknownFlopsError, count_flops, flops_or_reason
from tests.models import build, build_glm, tiny, tiny_composite, tiny_glm

LENGTH = 16
# A causal mask's pairs, of a sequence's; implementations that torch's counter sees compute all.
CAUSAL, ALL = LENGTH * (LENGTH + 1) // 2, LENGTH * LENGTH


def llama(**fields: Any) -> nn.Module:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        vocab_size=64,
        attn_implementation="eager",
        **fields,
    )
    return AutoModelForCausalLM.from_config(config)


def run(model: nn.Module, *, backward: bool, batch: int = 1) -> int:
    """What torch counts while the model runs on random tokens."""
    ids = torch.randint(0, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(3))
    model.config._experts_implementation = "eager"  # each expert a product of its own, which torch counts
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, use_cache=False)
        if backward:
            output.logits.sum().backward()
    return counter.get_total_flops()


def with_all_pairs(flops: ModelFlops) -> int:
    """A forward's FLOPs with each query looking at every key, as eager attention computes it."""
    return flops.forward([LENGTH]) + sum(kind.per_pair * (ALL - kind.pairs(LENGTH)) for kind in flops.attention)


def test_a_dense_layer_by_hand() -> None:
    flops = count_flops(llama())
    attention = 32 * 32 + 32 * 16 + 32 * 16 + 32 * 32  # queries, keys, values, output
    mlp = 3 * 32 * 48
    head = 32 * 64
    assert flops.weights == flops.trained_weights == 2 * (2 * (attention + mlp) + head)
    # 4 heads of 8: scores and their product with the values, 2 FLOPs for each of 32 numbers.
    assert flops.attention == (Attention(2 * 2 * 32),) * 2
    forward = LENGTH * flops.weights + 2 * (2 * 2 * 32) * CAUSAL
    assert flops.forward([LENGTH]) == forward
    assert flops.training([LENGTH]) == 3 * forward


def test_a_layer_with_experts_by_hand() -> None:
    # One dense layer, one of 4 experts of which 2 work, and a shared one.
    flops = count_flops(build_glm(tiny_glm()))
    attention = 2 * 32 * (2 * 16) + 2 * 32 * 16  # queries and output: 2 heads of 16; keys and values: one
    dense = 3 * 32 * 64
    expert = 3 * 32 * 16
    router = 4 * 32
    head = 32 * 64
    assert flops.weights == 2 * (2 * attention + dense + 2 * expert + expert + router + head)
    assert flops.attention == (Attention(2 * 2 * 32),) * 2


def test_linear_attention_by_hand() -> None:
    # 4 heads of values, keys and values of 16: decay and correction, update, read.
    assert count_flops(build(tiny("qwen3_5"))).states == 3 * 2 * 4 * 16 * 16


@pytest.mark.parametrize("name", ["llama", "glm", "mixtral", "qwen3", "minimax"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
def test_torch_counts_the_same_when_it_runs(name: str, backward: bool) -> None:
    model = llama() if name == "llama" else build(tiny(name))
    flops = count_flops(model)
    if not backward:
        assert run(model, backward=False) == with_all_pairs(flops)
        return
    masked = sum((3 if kind.backward else 1) * kind.per_pair * (ALL - kind.pairs(LENGTH)) for kind in flops.attention)
    assert run(model, backward=True) == flops.training([LENGTH]) + masked


def test_sparse_attention_counts_its_blocks_and_its_indexer() -> None:
    flops = count_flops(build(tiny("minimax")))
    # Of two layers of three: queries of 2 heads of 16, keys of one; their scores. They choose, and learn nothing.
    assert flops.choices == 2 * 2 * 32 * (2 * 16 + 16)
    assert [kind.per_pair for kind in flops.attention if not kind.backward] == [2 * 2 * 16] * 2
    # One local block and one more, of 4 keys each; a query in the second block sees what is before it.
    assert Attention(1, blocks=(4, 2)).pairs(8) == sum(range(1, 9))
    assert Attention(1, blocks=(4, 2)).pairs(12) == sum(range(1, 9)) + sum(4 + own for own in (1, 2, 3, 4))


@pytest.mark.parametrize("length", [1, 5, 16, 40])
@pytest.mark.parametrize("kind", [Attention(1), Attention(1, window=8), Attention(1, blocks=(4, 3))], ids=repr)
def test_pairs_are_those_of_a_mask(kind: Attention, length: int) -> None:
    seen = 0
    for query in range(length):
        keys = list(range(query + 1))
        if kind.window is not None:
            keys = keys[-kind.window :]
        if kind.blocks is not None:
            size, chosen = kind.blocks
            blocks = sorted({key // size for key in keys})[-chosen:]  # any others are as large
            keys = [key for key in keys if key // size in blocks]
        seen += len(keys)
    assert kind.pairs(length) == seen


def test_a_window_is_the_models_own() -> None:
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=1,
        num_key_value_heads=2,
        sliding_window=6,
        vocab_size=64,
    )
    (attention,) = count_flops(AutoModelForCausalLM.from_config(config)).attention
    assert attention.window == 6


def test_two_short_sequences_look_at_less_than_a_long_one() -> None:
    flops = count_flops(llama())
    assert flops.forward([LENGTH, LENGTH]) == 2 * flops.forward([LENGTH]) < flops.forward([2 * LENGTH])


def test_frozen_weights_get_no_gradient_but_pass_one_on() -> None:
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.lm_head.weight.requires_grad = True
    flops = count_flops(model)
    assert flops.trained_weights == 2 * 32 * 64
    assert flops.training([1]) == 2 * flops.weights + flops.trained_weights + 3 * 2 * (2 * 2 * 32)


def test_weights_need_not_be_there() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("glm"))
    assert count_flops(model) == count_flops(build(tiny("glm")))


@pytest.mark.parametrize("family", ["qwen3_5", "minimax"])
def test_of_a_model_of_text_and_vision_the_text_counts(family: str) -> None:
    assert count_flops(build(tiny_composite(family))) == count_flops(build(tiny(family)))


def test_a_head_that_shares_the_embeddings_weight_counts() -> None:
    assert count_flops(llama(tie_word_embeddings=True)) == count_flops(llama())


class Wrapped(nn.Module):
    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(models)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 4))


def test_what_is_not_known_is_named() -> None:
    assert count_flops(Wrapped(llama())) == count_flops(llama())
    for root, reason in [
        (nn.Linear(2, 2), "0 Hugging Face models"),
        (Wrapped(llama(), llama()), "2 Hugging Face models"),
        (AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=9)), "recognised in 0"),
    ]:
        with pytest.raises(UnknownFlopsError, match=reason):
            count_flops(root)
        assert reason in str(flops_or_reason(root))
    model = llama()
    model.odd = Odd()
    with pytest.raises(UnknownFlopsError, match=r"odd.table .*unknown use"):
        count_flops(model)


def test_lora_counts_its_adapters_and_freezes_the_rest() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    flops, plain = count_flops(model), count_flops(llama())
    adapters = 2 * 2 * (32 * 2 + 2 * 32)  # of two layers
    assert flops.weights == plain.weights + adapters
    assert flops.trained_weights == adapters
    assert flops.attention == plain.attention
