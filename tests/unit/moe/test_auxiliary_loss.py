# SPDX-License-Identifier: Apache-2.0
"""A coefficient without effect is named when the call doesn't ask for router logits either, and only then."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_zero3.moe.auxiliary_loss import warn_if_off
from tests.models import build, tiny


def told(family: str, fields: dict[str, Any], training: bool = True, **arguments: Any) -> list[str]:
    model = build(tiny(family, **fields)).train(training)
    warn_if_off(model, "net")
    ids = torch.zeros(1, 4, dtype=torch.long)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=ids, **arguments)
    return [str(w.message) for w in caught if "router_aux_loss_coef" in str(w.message)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_the_default_of_transformers_is_named_once(family: str) -> None:
    (message,) = told(family, {})
    assert "net (" in message
    assert "router_aux_loss_coef=0.001" in message


def test_nothing_is_said_of_what_is_on_absent_or_evaluated() -> None:
    assert told("mixtral", {"output_router_logits": True}) == []
    assert told("mixtral", {}, output_router_logits=True) == []
    assert told("mixtral", {"router_aux_loss_coef": 0.0}) == []
    assert told("glm", {}) == []
    assert told("mixtral", {}, training=False) == []


def test_a_call_that_switches_it_off_is_named() -> None:
    assert len(told("mixtral", {"output_router_logits": True}, output_router_logits=False)) == 1
