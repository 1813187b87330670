"""Building from a config takes at most a rank's share and twice the largest layer or embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe.build import build_from_config
from tests.fits import Language, Sentences, fit
from tests.memory import peak_of_resident_memory, peak_of_tensors
from tests.models import tiny_glm

MIB = 1 << 20
# Python objects, collectives' buffers and pages that the allocator keeps.
RESIDENT_SLACK = 24 * MIB
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
    def __init__(self, config: Glm4MoeConfig, how: str, measure: Any, options: dict[str, Any]) -> None:
        super().__init__(None)
        self.config, self.how, self.measure, self.options = config, how, measure, options

    def configure_model(self) -> None:
        if self.some_odd_name is not None:
            return
        # What a process loads and allocates once isn't what a model takes.
        HOW[self.how](tiny_glm(), **self.options)
        with self.measure() as self.peak:
            self.some_odd_name = HOW[self.how](self.config, **self.options)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measured(how: str, width: int, layers: int, precision: str, measure: Any, options: dict[str, Any]) -> dict[str, int]:
    config = config_of(width, layers)
    module = Measured(config, how, measure, options)
    fit(module, Sentences(64), Zero3FastStrategy(), steps=1, precision=precision)
    model = module.some_odd_name

    def whole(part: torch.nn.Module) -> int:
        return sum(parameter.ds_numel * parameter.element_size() for parameter in part.parameters())

    return {
        "share": sum(p.ds_tensor.numel() * p.element_size() for p in model.parameters()),
        "largest": max(whole(part) for part in [*model.model.layers, model.model.embed_tokens, model.lm_head]),
        "whole": whole(model),
        "tensors": module.peak.tensors,
        "resident": module.peak.resident,
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("how", HOW)
def test_tensors_that_live_during_a_build(ranks, how, precision):
    options = {"dtype": torch.bfloat16} if precision == "bf16-mixed" and how == "from_config" else {}
    for seen in ranks(2).run(measured, how, 192, 10, precision, peak_of_tensors, options):
        print(how, precision, seen, (seen["tensors"] - seen["share"]) / seen["largest"])
        allowed = seen["share"] + 2 * seen["largest"]
        assert allowed < seen["whole"]
        assert seen["share"] < seen["tensors"] <= allowed


def test_resident_memory_during_a_build(ranks):
    for seen in ranks(2).run(measured, "from_config", 512, 10, "32-true", peak_of_resident_memory, {}):
        print(seen, (seen["resident"] - seen["share"]) / seen["largest"])
        allowed = seen["share"] + 2 * seen["largest"] + RESIDENT_SLACK
        assert seen["whole"] > 400 * MIB
        assert allowed < seen["whole"]
        assert seen["share"] < seen["resident"] <= allowed
