# SPDX-License-Identifier: Apache-2.0
"""Which modules choose among a list of experts, and which only look like it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_zero3.moe.leaf_modules import LeafModuleError, find_expert_modules, mark_leaf_modules


class Block(nn.Module):
    """A module with a forward and the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Expert(nn.Linear):
    pass


class FeedForwardExpertLayer(nn.Linear):
    pass


class Experts(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ExpertsOnlyHeld(nn.ModuleList):
    pass


def lin() -> nn.Module:
    return nn.Linear(2, 2)


def listed(number: int = 2, item: Any = lin) -> nn.ModuleList:
    return nn.ModuleList(item() for _ in range(number))


def named(number: int = 2) -> Experts:
    return Experts({f"expert_{i}": lin() for i in range(number)})


class WeightRouter(Block):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__(**children)
        self.router = nn.Parameter(torch.zeros(2, 2))


FOUND = {
    "an attribute called experts": (Block(moe=Block(experts=listed())), ["moe"]),
    "routed_experts": (Block(moe=Block(routed_experts=listed())), ["moe"]),
    "expert_list": (Block(moe=Block(expert_list=listed())), ["moe"]),
    "a dict": (Block(moe=Block(experts=nn.ModuleDict({"a": lin(), "b": lin()}))), ["moe"]),
    "a dict with a forward is called itself": (Block(moe=Block(experts=named())), ["moe.experts"]),
    "a list class without a forward": (Block(moe=Block(ffns=ExpertsOnlyHeld([lin(), lin()]))), ["moe"]),
    "named by the items' class": (Block(moe=Block(ffns=listed(item=lambda: Expert(2, 2)))), ["moe"]),
    "named in the items' class": (Block(moe=Block(ffns=listed(item=lambda: FeedForwardExpertLayer(2, 2)))), ["moe"]),
    "next to a gate": (Block(moe=Block(gate=lin(), ffns=listed())), ["moe"]),
    "next to a router's weight": (Block(moe=WeightRouter(ffns=listed())), ["moe"]),
    "a dropout beside them": (Block(moe=Block(experts=nn.ModuleList([lin(), lin(), nn.Dropout()]))), ["moe"]),
    "a list of lists": (Block(moe=Block(experts=nn.ModuleList([listed(), listed()]))), ["moe"]),
    "in every layer": (
        Block(layers=nn.ModuleList(Block(mlp=Block(experts=listed())) for _ in range(2))),
        ["layers.0.mlp", "layers.1.mlp"],
    ),
    "one in another": (Block(moe=Block(experts=listed(item=lambda: Block(experts=listed())))), ["moe"]),
    "one expert is no choice": (Block(moe=Block(experts=listed(1))), []),
    "layers": (Block(model=Block(layers=listed(4))), []),
    "a gated MLP": (Block(mlp=Block(gate_proj=lin(), up_proj=lin(), down_proj=lin())), []),
    "gates of their own": (Block(mixture=Block(towers=listed(), gates=listed())), []),
    "experts without weights": (Block(moe=Block(experts=nn.ModuleList([nn.ReLU(), nn.ReLU()]))), []),
    "an expert_bias": (Block(moe=Block(expertise=listed())), []),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case):
    root, expected = FOUND[case]
    assert list(find_expert_modules(root)) == expected


def test_transformers_models_with_lists_of_experts():
    from transformers import NllbMoeConfig, NllbMoeModel, SwitchTransformersConfig, SwitchTransformersModel

    switch = SwitchTransformersModel(
        SwitchTransformersConfig(
            d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=2, num_decoder_layers=2, num_experts=2, vocab_size=9,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        )
    )  # fmt: skip
    nllb = NllbMoeModel(
        NllbMoeConfig(
            d_model=8, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_experts=2,
            encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=9, encoder_sparse_step=2,
            decoder_sparse_step=2,
        )
    )  # fmt: skip
    for model in (switch, nllb):
        found = find_expert_modules(model)
        assert found
        assert all(name.endswith("experts") and isinstance(m, nn.ModuleDict) for name, m in found.items())


def test_experts_in_one_tensor_need_nothing():
    from tests.models import build_glm, tiny_glm

    assert not find_expert_modules(build_glm(tiny_glm()))


def test_marks_are_set_said_and_kept(caplog, monkeypatch):
    # Whatever rank and levels other tests have left behind.
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    root = Block(a=Block(experts=listed()), b=Block(experts=listed()), c=Block(inner=Block(experts=listed())))
    root.b._z3_leaf = False
    root.c._z3_leaf = True
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        assert mark_leaf_modules(root, {}) == ["a"]
    assert "Experts in lists: a will be gathered" in caplog.text
    assert [root.a._z3_leaf, root.b._z3_leaf, root.c._z3_leaf] == [True, False, True]
    assert not hasattr(root.c.inner, "_z3_leaf")
    assert mark_leaf_modules(root, {}) == []


def test_experts_on_the_root_are_refused_unless_it_is_said_that_all_are_used():
    root = Block(experts=listed())
    with pytest.raises(LeafModuleError, match=r"Block holds a list of experts.*an nn.Module of their own"):
        mark_leaf_modules(root, {})
    root._z3_leaf = False
    assert mark_leaf_modules(root, {}) == []


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"names": ["layer.moe"]}, "leaf_module.names has 'layer.moe'.*Did you mean 'layers.moe'"),
        ({"names": "layer.moe"}, "leaf_module.names has 'layer.moe'"),
        ({"name_suffixes": ["mixture"]}, "leaf_module.name_suffixes has 'mixture'"),
        ({"classes": ["Blok"]}, "leaf_module.classes has 'Blok'.*Did you mean 'Block'"),
    ],
)
def test_a_leaf_in_the_config_that_is_not_there(section, says):
    root = Block(layers=Block(moe=Block(experts=listed())))
    with pytest.raises(LeafModuleError, match=says):
        mark_leaf_modules(root, {"zero_optimization": {"leaf_module": section}})


@pytest.mark.parametrize("section", [None, {"names": ["layers.moe"]}, {"name_suffixes": "moe"}, {"classes": ["Block"]}])
def test_a_leaf_in_the_config_that_is_there(section):
    root = Block(layers=Block(moe=Block(experts=listed())))
    assert mark_leaf_modules(root, {"zero_optimization": {"leaf_module": section}}) == ["layers.moe"]
