# SPDX-License-Identifier: Apache-2.0
"""Operations, against torch's own counter on real models and against counts by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero3.flops import count_flops
from lightning_zero3.plan.flops import Flops, flops_of
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.plan.structure import PlannedParameter
from tests.models import build, tiny

LENGTH, SAMPLES = 12, 3


def parameter(name: str, *shape: int) -> PlannedParameter:
    elements = torch.Size(shape).numel()
    return PlannedParameter(
        name=name,
        shape=shape,
        elements=elements,
        partition_elements=elements,
        kind="expert" if ".experts." in name else "dense",
        group_size=1,
        persistent=False,
        sub_group=0,
        requires_grad=True,
    )


def planned(model: Any, **options: Any) -> Flops:
    parameters = [parameter(name, *p.shape) for name, p in model.named_parameters()]
    return flops_of(parameters, shape_of(model.config), sequence_length=LENGTH, samples=SAMPLES, **options)


def counted(family: str) -> tuple[Flops, int, int, Any]:
    """Ours of one forward, without the causal half, and torch's of forward and of forward and backward."""
    config = tiny(family)
    config._experts_implementation = "eager"
    model = build(config)
    ids = torch.randint(0, config.vocab_size, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    with FlopCounterMode(display=False) as both:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return planned(model, causal=False), forward.get_total_flops(), both.get_total_flops(), forward


@pytest.mark.parametrize("family", ["glm", "mixtral", "qwen3", "minimax"])
def test_torch_counts_the_same(family: str) -> None:
    ours, forward, both, _ = counted(family)
    assert ours.forward == forward
    assert ours.training(recompute=False) == both


@pytest.mark.parametrize("family", ["glm", "mixtral", "qwen3", "minimax", "qwen3_5"])
def test_a_run_counts_the_same_for_its_mfu(family: str) -> None:
    config = tiny(family)
    if family == "minimax":
        config.index_topk_blocks = LENGTH // config.index_block_size  # so that blocks leave no key out
    model = build(config)
    ours, runs, lengths = planned(model), count_flops(model), [LENGTH] * SAMPLES
    # A plan leaves convolutions over four tokens out.
    convolutions = 2 * sum(p.numel() for name, p in model.named_parameters() if "conv1d" in name) * sum(lengths)
    assert (convolutions > 0) == (family == "qwen3_5")
    assert ours.forward + convolutions == runs.forward(lengths)
    assert ours.training(recompute=False) + 3 * convolutions == runs.training(lengths)


def test_linear_attention_is_bounded_from_below() -> None:
    ours, forward, both, counter = counted("qwen3_5")
    by_kind = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    assert ours.linear + ours.experts + ours.logits == by_kind["aten.mm"]
    # Transformers' own code works by chunks of 64 tokens, however few there are.
    assert 0 < ours.linear_attention + ours.attention < by_kind["aten.bmm"]
    assert ours.forward < forward
    assert ours.training(recompute=False) < both


def test_a_dense_layer_by_hand() -> None:
    config = SimpleNamespace(
        hidden_size=8, vocab_size=100, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
    )
    parameters = [
        parameter("model.embed_tokens.weight", 100, 8),
        parameter("model.layers.0.input_layernorm.weight", 8),
        parameter("model.layers.0.self_attn.q_proj.weight", 8, 8),
        parameter("model.layers.0.self_attn.k_proj.weight", 4, 8),
        parameter("model.layers.0.self_attn.v_proj.weight", 4, 8),
        parameter("model.layers.0.self_attn.o_proj.weight", 8, 8),
        parameter("model.layers.0.mlp.up_proj.weight", 16, 8),
        parameter("model.layers.0.mlp.down_proj.weight", 8, 16),
        parameter("lm_head.weight", 100, 8),
    ]
    flops = flops_of(parameters, shape_of(config), sequence_length=10)
    assert flops.linear == 2 * 10 * (64 + 32 + 32 + 64 + 128 + 128)
    # 55 pairs of a query and a key that it sees, two heads of 4, scores and sums.
    assert flops.attention == 55 * 2 * 2 * 2 * 4
    assert flops.logits == 2 * 10 * 800
    assert flops.experts == 0
    layers = flops.linear + flops.attention
    assert flops.training(recompute=False) == 3 * (layers + 16_000)
    assert flops.training(recompute=True) == 4 * layers + 3 * 16_000


def test_an_moe_layer_by_hand() -> None:
    config = SimpleNamespace(
        hidden_size=8,
        vocab_size=100,
        num_attention_heads=2,
        num_hidden_layers=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
    )
    # A quarter of the experts, as one of 4 ranks holds them: it works on as many rows as all ranks' tokens give.
    parameters = [
        parameter("model.layers.0.mlp.router.gate.weight", 16, 8),
        parameter("model.layers.0.mlp.experts.w1", 4, 6, 8),
        parameter("model.layers.0.mlp.experts.w2", 4, 8, 6),
        parameter("model.layers.0.mlp.experts.w3", 4, 6, 8),
        parameter("model.layers.0.mlp.shared_experts.up_proj.weight", 6, 8),
    ]
    flops = flops_of(parameters, shape_of(config), sequence_length=10, samples=2)
    assert flops.experts == 2 * (20 * 4) * 3 * 48
    assert flops.linear == 2 * 20 * (128 + 48)
    listed = [parameter(f"model.layers.0.mlp.experts.{i}.up_proj.weight", 6, 8) for i in range(16)]
    assert flops_of(listed, shape_of(config), sequence_length=10, samples=2).experts == 2 * (20 * 4) * 48
