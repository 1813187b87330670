# SPDX-License-Identifier: Apache-2.0
"""Which models have correction biases that can be moved; what the others are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero3.moe.router import BIAS, NoCorrectionBiasError, find_routers
from tests.models import build, tiny


@pytest.mark.parametrize("family", ["glm", "minimax"])
def test_the_routers_of_a_model_are_found_in_its_order(family: str) -> None:
    held = nn.ModuleDict({"at": build(tiny(family))})
    assert list(find_routers(held)) == [f"at.model.layers.{layer}.mlp.gate" for layer in (1, 2)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "qwen3_5"])
def test_a_model_without_biases_is_refused_by_name(family: str) -> None:
    model = build(tiny(family))
    with pytest.raises(NoCorrectionBiasError, match=f"{type(model).__name__}, model_type='{model.config.model_type}'"):
        find_routers(nn.ModuleDict({"at": model}))


def test_a_module_that_is_no_model_is_refused_by_its_class() -> None:
    with pytest.raises(NoCorrectionBiasError, match="no router in Linear has a correction bias"):
        find_routers(nn.Linear(2, 2))


def test_a_bias_that_is_a_parameter_is_refused_by_name() -> None:
    holder = nn.Module()
    holder.statistics = nn.Module()
    holder.statistics.register_parameter(BIAS, nn.Parameter(torch.zeros(4), requires_grad=False))
    with pytest.raises(NoCorrectionBiasError, match=rf"statistics\.{BIAS} is a parameter"):
        find_routers(holder)
