# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss is in the loss under AutoEP, as in plain Transformers; a coefficient without effect is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from tests.fits import Sentences, fit
from tests.models import build, tiny
from tests.parity import Observed, batch_of

FAMILIES = ("mixtral", "qwen3", "qwen3_5", "minimax")
COEFFICIENT = 0.1


def trained(family: str, size: int | None, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """One step with the model's own config saying whether there is an auxiliary loss."""
    rank = torch.distributed.get_rank()
    config = {"router_aux_loss_coef": COEFFICIENT, **fields}
    module = Observed(build(tiny(family, **config)), batch_of(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, Sentences(64), Zero3FastStrategy(expert_parallel_size=size, **options), steps=2)
    plain = build(tiny(family, **config))
    batch = batch_of(rank)
    with torch.no_grad():
        on = plain(input_ids=batch, labels=batch, output_router_logits=True)
        off = plain(input_ids=batch, labels=batch, output_router_logits=False)
    return {
        "loss": module.seen["loss"].item(),
        "on": on.loss.item(),
        "off": off.loss.item(),
        "aux": on.aux_loss.item(),
        "warned": [str(w.message) for w in caught if "router_aux_loss_coef" in str(w.message)],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_has_the_auxiliary_loss_in_it(ranks, family):
    for seen in ranks(2).run(trained, family, 2, {"output_router_logits": True}):
        assert seen["loss"] == pytest.approx(seen["on"], rel=1e-5)
        assert seen["loss"] - seen["off"] == pytest.approx(COEFFICIENT * seen["aux"], rel=1e-3)
        assert seen["warned"] == []


def test_a_coefficient_without_effect_is_named_once(ranks):
    for rank, seen in enumerate(ranks(2).run(trained, "qwen3", 2, {})):
        assert seen["loss"] == pytest.approx(seen["off"], rel=1e-5)
        assert len(seen["warned"]) == (rank == 0)
        for message in seen["warned"]:
            assert "some_odd_name.at.depth (Qwen3MoeForCausalLM) has router_aux_loss_coef=0.1" in message
            assert "output_router_logits=True" in message


def balanced_otherwise() -> list[Any]:
    return trained("minimax", 1, {}, router_bias_update_speed=0.001)["warned"]


def test_who_moves_biases_needs_no_auxiliary_loss(ranks):
    assert ranks(1).run(balanced_otherwise) == [[]]
