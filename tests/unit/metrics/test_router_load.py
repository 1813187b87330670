# SPDX-License-Identifier: Apache-2.0
"""Router load from counts: known answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero3.metrics import names
from lightning_zero3.metrics.router_load import entropy, router_load


def test_a_skewed_router_gives_the_known_numbers() -> None:
    # Half of the tokens to the first expert, a quarter to two each, none to five.
    values = router_load({"layer_1": [8, 4, 4, 0, 0, 0, 0, 0]})
    assert values[names.EXPERT_LOAD] == 8 / 2
    assert values[names.EXPERT_ENTROPY] == pytest.approx(1.5 / 3)  # 1.5 bits of 3
    assert values[names.DEAD_EXPERTS] == 5


def test_over_all_layers_the_worst_counts_and_dead_experts_add_up() -> None:
    values = router_load({"layer_1": [2, 2], "layer_2": [4, 0], "layer_3": [3, 1]})
    assert values[names.EXPERT_LOAD] == values[f"{names.EXPERT_LOAD}/layer_2"] == 2
    assert values[names.EXPERT_ENTROPY] == values[f"{names.EXPERT_ENTROPY}/layer_2"] == 0
    assert values[names.DEAD_EXPERTS] == 1
    assert values[f"{names.EXPERT_ENTROPY}/layer_1"] == values[f"{names.EXPERT_LOAD}/layer_1"] == 1


def test_a_layer_in_which_nothing_was_counted_has_no_metrics() -> None:
    assert router_load({}) == router_load({"layer_1": [0, 0]}) == {}
    assert f"{names.DEAD_EXPERTS}/layer_2" not in router_load({"layer_1": [1, 0], "layer_2": [0, 0]})


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any))
def test_bounds(tokens: list[int]) -> None:
    values = router_load({"layer_1": tokens})
    assert 1 <= values[names.EXPERT_LOAD] <= len(tokens)
    assert -1e-9 <= values[names.EXPERT_ENTROPY] <= 1 + 1e-9
    assert math.isclose(entropy(tokens), entropy([3 * count for count in reversed(tokens)]), abs_tol=1e-9)
