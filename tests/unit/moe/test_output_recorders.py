# SPDX-License-Identifier: Apache-2.0
"""AutoEP moves Transformers' output recorders, with our help where the two don't fit, and leaves nothing behind."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from torch import nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.utils import output_capturing

from lightning_zero3.capabilities.limits import needs_output_recorders, output_recorders_break
from lightning_zero3.moe.expert_parallel import check_layers, find_target
from lightning_zero3.moe.output_recorders import (
    _registry_of_either_key,
    as_transformers_records,
    movable_recorders,
    recorders_can_be_moved,
)
from lightning_zero3.moe.presets import UnsupportedModelError
from lightning_zero3.topology import Topology
from tests.models import build, tiny

pytestmark = pytest.mark.skipif(not output_recorders_break(), reason="the installed DeepSpeed and Transformers fit")
REGISTRY = output_capturing._CAN_RECORD_REGISTRY


def test_recorders_move_inside_the_block_and_not_outside():
    before, kind = dict(REGISTRY), type(REGISTRY)
    with movable_recorders("mixtral"):
        assert output_capturing._CAN_RECORD_REGISTRY is REGISTRY
        assert not output_recorders_break()
    assert type(REGISTRY) is kind
    assert dict(REGISTRY) == before
    assert output_recorders_break()
    assert recorders_can_be_moved("mixtral")


def test_the_registry_is_itself_again_after_a_failure():
    kind = type(REGISTRY)
    with pytest.raises(RuntimeError, match="while initializing"), movable_recorders("mixtral"):
        raise RuntimeError("while initializing")
    assert type(REGISTRY) is kind


def test_transformers_own_use_goes_on_inside_the_block():
    with movable_recorders("mixtral"):
        model = build(tiny("mixtral"))
        assert "router_logits" in REGISTRY.get(model)
        assert REGISTRY.get(nn.Linear(1, 1)) == {}
        assert REGISTRY.get("no class") is None
    assert "router_logits" in REGISTRY.get(model)


def test_nothing_is_done_for_a_preset_that_moves_nothing_nor_once_upstream_fits():
    with movable_recorders("deepseek_v3"):
        assert output_recorders_break()
    assert recorders_can_be_moved("deepseek_v3")
    # As once DeepSpeed and Transformers fit.
    with _registry_of_either_key():
        kind = type(REGISTRY)
        with movable_recorders("mixtral"):
            assert type(REGISTRY) is kind


@pytest.mark.parametrize(("preset", "moves"), [("deepseek_v3", False), ("mixtral", True), ("qwen3_moe", True)])
def test_which_presets_move_recorders(preset, moves):
    assert needs_output_recorders(preset) is moves


class AnotherRegistry(dict):
    """As a release might have it, in a way that nobody here knows."""

    def update(self, *_):
        raise TypeError("not like this")


def test_a_registry_of_an_unknown_kind_is_refused_before_training(monkeypatch):
    target = find_target(build(tiny("mixtral")))
    section, layout = {"enabled": True, "autoep_size": 1}, Topology(world_size=1)
    assert check_layers(target, section, layout) == 2
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", AnotherRegistry(REGISTRY))
    with pytest.raises(UnsupportedModelError, match=r"preset 'mixtral', for the module .*transformers<5\.23"):
        check_layers(target, section, layout)


class SoftmaxedRouter(nn.Module):
    """As Transformers' before 5.3: what it records are probabilities."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, config.hidden_size))

    def forward(self, tokens):
        return (tokens @ self.weight.T).softmax(-1), None


class OddRouter(nn.Module):
    """It can't be made from a config."""


def capture_mode(router, config):
    """How the logits of a model with this router would be recorded, if DeepSpeed has Qwen's recorded as it does."""
    qwen = build(tiny("qwen3_5"))
    section = {"enabled": True, "autoep_size": 1, "preset_model": "qwen3_5_moe"}
    layer, _ = AutoEP(qwen, parse_autoep_config(section)).ep_parser()
    assert layer.router_logits_capture_mode == "post_score"
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": router})})
    model.config = config
    (planned,) = as_transformers_records([replace(layer, moe_module_name="mlp")], model)
    return planned.router_logits_capture_mode


def test_probabilities_stay_where_transformers_records_probabilities():
    config = SimpleNamespace(hidden_size=16)
    assert capture_mode(SoftmaxedRouter(config), config) == "post_score"


def test_a_router_that_can_not_be_tried_is_left_alone_with_a_warning():
    with pytest.warns(UserWarning, match="OddRouter can't be tried out"):
        assert capture_mode(OddRouter(), SimpleNamespace(hidden_size=16)) == "post_score"


def test_qwens_logits_are_recorded_raw():
    config = tiny("qwen3_5")
    assert capture_mode(Qwen3_5MoeTopKRouter(config), config) == "raw"
