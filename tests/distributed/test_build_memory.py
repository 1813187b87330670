# SPDX-License-Identifier: Apache-2.0
"""Building from a config takes at most a rank's share and twice the largest layer or embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.sharded_build import sharded_build
from tests.fits import Language, Sentences, fit
from tests.memory import peak_of_resident_memory, peak_of_tensors
from tests.models import tiny_glm

MIB = 1 << 20
# Python objects, small tensors that the allocator keeps, and how late gloo lets go of what it has sent.
RESIDENT_SLACK = 48 * MIB
HOW: dict[str, Callable[..., Any]] = {
    "constructor": lambda config, **_: Glm4MoeForCausalLM(config),
    "from_config": AutoModelForCausalLM.from_config,
    "build_from_config": lambda config, **_: build_from_config(Glm4MoeForCausalLM, config),
}


def config_of(width: int, layers: int) -> Glm4MoeConfig:
    return tiny_glm(
        hidden_size=width,
        intermediate_size=4 * width,
        moe_intermediate_size=width,
        n_routed_experts=12,
        num_hidden_layers=layers,
        vocab_size=38 * width,
    )


class Measured(Language):
    def __init__(self, config: Glm4MoeConfig, how: str, options: dict[str, Any]) -> None:
        super().__init__(None)
        self.config, self.how, self.options = config, how, options

    def configure_model(self) -> None:
        if self.some_odd_name is not None:
            return
        # What a process loads and allocates once isn't what a model takes.
        HOW[self.how](tiny_glm(), **self.options)
        with peak_of_tensors() as self.peak:
            self.some_odd_name = HOW[self.how](self.config, **self.options)


def sizes(model: Any) -> dict[str, int]:
    def whole(part: torch.nn.Module) -> int:
        return sum(parameter.ds_numel * parameter.element_size() for parameter in part.parameters())

    return {
        "share": sum(p.ds_tensor.numel() * p.element_size() for p in model.parameters()),
        "largest": max(whole(part) for part in [*model.model.layers, model.model.embed_tokens, model.lm_head]),
        "whole": whole(model),
    }


def live(how: str, precision: str, options: dict[str, Any]) -> dict[str, int]:
    module = Measured(config_of(192, 10), how, options)
    fit(module, Sentences(64), Zero3FastStrategy(), steps=1, precision=precision)
    return {**sizes(module.some_odd_name), "peak": module.peak.tensors}


def resident(how: str) -> dict[str, int]:
    """Without an engine: what training takes is another matter."""
    with sharded_build({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        HOW[how](tiny_glm())
        with peak_of_resident_memory() as peak:
            model = HOW[how](config_of(384, 18))
    return {**sizes(model), "peak": peak.resident}


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", HOW)
def test_tensors_that_live_during_a_build(ranks, how, precision):
    options = {"dtype": torch.bfloat16} if precision == "bf16-mixed" and how == "from_config" else {}
    for seen in ranks(2).run(live, how, precision, options):
        allowed = seen["share"] + 2 * seen["largest"]
        assert allowed < seen["whole"]
        assert seen["share"] < seen["peak"] <= allowed


@pytest.mark.slow
def test_resident_memory_during_a_build(ranks):
    for seen in ranks(2).run(resident, "from_config"):
        allowed = seen["share"] + 2 * seen["largest"] + RESIDENT_SLACK
        assert seen["whole"] > 400 * MIB
        assert allowed < seen["whole"]
        assert seen["share"] < seen["peak"] <= allowed, (seen["peak"] - seen["share"]) / seen["largest"]
