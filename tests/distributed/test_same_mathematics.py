"""AutoEP's layers are the same function as Transformers': logits, losses and every gradient, for each model family."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import FAMILIES
from tests.parity import relative_errors

# GLM has no auxiliary loss in Transformers.
WITH_AUXILIARY_LOSS = [family for family in FAMILIES if family != "glm"]
EXACT = 1e-5


def compared(family: str, options: dict[str, Any], broken: Any = None) -> dict[str, float]:
    arguments = {"output_router_logits": True} if family in WITH_AUXILIARY_LOSS else {}
    return relative_errors(family, options, arguments)


def assert_exact(family: str, every_ranks: list[dict[str, float]]) -> None:
    for errors in every_ranks:
        assert ("aux_loss" in errors) is (family in WITH_AUXILIARY_LOSS)
        assert {"loss", "logits"} < set(errors)
        assert max(errors.values()) < EXACT, {name: error for name, error in errors.items() if not error < EXACT}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_with_autoep_layers(ranks, family):
    assert_exact(family, ranks(1).run(compared, family, {"expert_parallel_size": 1}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 2},
        {"tensor_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2, "expert_parallel_size": 2}, id="both"),
    ],
    ids=str,
)
def test_two_ranks(ranks, family, options):
    assert_exact(family, ranks(2).run(compared, family, options))
