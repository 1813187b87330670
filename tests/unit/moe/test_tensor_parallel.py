# SPDX-License-Identifier: Apache-2.0
"""Which model is split and how, and what is checked before any process group exists."""

import re
from typing import Any

import pytest
from torch import nn

from lightning_zero3.moe import tensor_parallel
from lightning_zero3.moe.expert_parallel import ExpertParallelTarget
from lightning_zero3.moe.presets import UnsupportedModelError
from lightning_zero3.moe.tensor_parallel import (
    ATTENTION,
    NoShardedLayerError,
    auto_tp_on,
    check_layers,
    find_target,
    partition_config,
    register_tensor_parallel,
)
from lightning_zero3.topology import Topology
from tests.models import FAMILIES, build, tiny

SECTION = {"autotp_size": 2}
TWO = Topology(world_size=4, tensor_parallel_size=2)


class Holder(nn.Module):
    """Somebody's module."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


@pytest.mark.parametrize(
    ("family", "split"),
    # 4 projections for each attention that is split, 3 (MiniMax: 2) for each dense layer or shared expert.
    [("glm", 3 * 4 + 3 * 3), ("qwen3_5", 1 * 4 + 2 * 3), ("minimax", 3 * 2), ("mixtral", 2 * 4), ("qwen3", 3 * 4 + 3)],
)
def test_the_layers_of_every_family_are_found(family: str, split: int) -> None:
    target = find_target(Holder(deep=Holder(net=build(tiny(family)))), SECTION)
    assert target.path == "deep.net"
    assert check_layers(target, TWO) == split


def test_every_family_has_a_plan() -> None:
    assert {tiny(family).model_type for family in FAMILIES} <= set(tensor_parallel._PLANS)


def test_patterns_are_bound_to_the_model() -> None:
    patterns = [p for spec in partition_config("mixtral", "student")["layer_specs"] for p in spec["patterns"]]

    def matches(name: str) -> bool:
        return any(re.match(pattern, name) for pattern in patterns)

    assert matches("student.model.layers.0.self_attn.q_proj.weight")
    assert not matches("teacher.model.layers.0.self_attn.q_proj.weight")
    assert not matches("student_2.model.layers.0.self_attn.q_proj.weight")
    assert not matches("student.model.layers.0.self_attn.q_proj.bias")


def test_the_root_itself_may_be_the_model() -> None:
    target = find_target(build(tiny("mixtral")), SECTION)
    assert target.path == ""
    assert check_layers(target, TWO) == 8


def test_with_expert_parallelism_its_model_is_the_one() -> None:
    first, second = build(tiny("mixtral")), build(tiny("qwen3"))
    root = Holder(first=first, second=second)
    with pytest.raises(UnsupportedModelError, match=r"several models: first \(mixtral\), second \(qwen3_moe\)"):
        find_target(root, SECTION)
    assert find_target(root, SECTION, ExpertParallelTarget("second", second, "qwen3_moe")).path == "second"


def test_an_unknown_type_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(tiny("mixtral"))
    model.config.model_type = "somebodys_moe"
    root = Holder(net=model)
    with pytest.raises(UnsupportedModelError, match=r"model_type='somebodys_moe'.*glm4_moe.*register_tensor_parallel"):
        find_target(root, SECTION)
    theirs = find_target(root, {**SECTION, "partition_config": {"layer_specs": []}})
    assert theirs.partition is None
    assert check_layers(theirs, TWO) == 0
    monkeypatch.setattr(tensor_parallel, "_PLANS", dict(tensor_parallel._PLANS))
    register_tensor_parallel("somebodys_moe", ATTENTION)
    assert check_layers(find_target(root, SECTION), TWO) == 8


def test_without_a_model_the_error_says_where_to_build_it() -> None:
    with pytest.raises(NoShardedLayerError, match=r"Holder holds no Hugging Face model .*configure_model"):
        find_target(Holder(net=nn.Linear(2, 2)), SECTION)


def test_a_plan_that_fits_no_layer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "_PLANS", {"mixtral": tensor_parallel.MLP})
    with pytest.raises(NoShardedLayerError, match=r"none of the layers of net \(MixtralForCausalLM\).*model, lm_head"):
        check_layers(find_target(Holder(net=build(tiny("mixtral"))), SECTION), TWO)


@pytest.mark.parametrize(
    ("family", "fields", "what"),
    [
        ("mixtral", {"num_key_value_heads": 1}, "num_key_value_heads of net .*: 1"),
        ("mixtral", {"num_attention_heads": 3, "num_key_value_heads": 1}, "num_attention_heads of net .*: 3"),
        ("glm", {"intermediate_size": 63}, r"the width of net\.model\.layers\.0\.mlp\.gate_proj\.weight: 63"),
        ("minimax", {"shared_intermediate_size": 25}, r"the width of net.*shared_experts\.gate_up_proj\.weight: 25"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(family: str, fields: dict[str, Any], what: str) -> None:
    target = find_target(Holder(net=build(tiny(family, **fields))), SECTION)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 doesn't divide {what}"):
        check_layers(target, TWO)


def test_autotp_reads_the_heads_of_the_model_that_it_splits_and_of_no_other() -> None:
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    before = vars(AutoTPMeta)["from_model_config"]
    target = find_target(Holder(net=build(tiny("mixtral"))), SECTION)
    with auto_tp_on(target):
        assert AutoTPMeta.from_model_config(None).num_kv_heads == 2
        assert AutoTPMeta.from_model_config(tiny("mixtral", num_key_value_heads=1), 1).num_kv_heads == 2
    assert vars(AutoTPMeta)["from_model_config"] is before
    assert AutoTPMeta.from_model_config(None).num_kv_heads is None
