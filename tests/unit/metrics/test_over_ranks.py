# SPDX-License-Identifier: Apache-2.0
"""Ranks' values into one: the arithmetic, and its place in torchmetrics. Real ranks are in tests/distributed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero3.metrics.over_ranks import PackedOverRanks, combined_over_ranks, packed

# Whole numbers: their float64 sums are exact in any order.
NUMBERS = st.integers(-(2**40), 2**40).map(float)
HOW = st.lists(st.sampled_from(["maximum", "sum", "mean"]), min_size=1, max_size=6)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Any], list[list[float]]]:
    """How entries combine, and a row of entries for each rank."""
    how = draw(HOW)
    row = st.lists(NUMBERS, min_size=len(how), max_size=len(how))
    return how, draw(st.lists(row, min_size=1, max_size=8))


COMBINE = {"sum": sum, "maximum": max, "mean": lambda column: sum(column) / len(column)}


def expected(how: list[Any], rows: list[list[float]]) -> list[list[float]]:
    """Combined, smallest, and the first rank of the largest."""
    columns = list(zip(*rows, strict=True))
    return [
        [COMBINE[entry](column) for entry, column in zip(how, columns, strict=True)],
        [min(column) for column in columns],
        [float(column.index(max(column))) for column in columns],
    ]


@settings(deadline=None)
@given(tables())
def test_each_entry_is_combined_in_its_own_way(table: tuple[list[Any], list[list[float]]]) -> None:
    how, rows = table
    combined = PackedOverRanks(how)._combine(torch.tensor(rows, dtype=torch.float64))
    assert torch.equal(combined, torch.tensor(expected(how, rows), dtype=torch.float64))


@settings(deadline=None)
@given(tables(), st.randoms())
def test_the_order_of_ranks_does_not_matter(table: tuple[list[Any], list[list[float]]], random: Any) -> None:
    how, rows = table
    metric = PackedOverRanks(how)
    *before, _ = metric._combine(torch.tensor(rows, dtype=torch.float64)).tolist()
    random.shuffle(rows)
    *after, _ = metric._combine(torch.tensor(rows, dtype=torch.float64)).tolist()
    assert after == before


@settings(deadline=None, max_examples=50)
@given(tables())
def test_torchmetrics_hands_over_all_ranks_by_one_gather(table: tuple[list[Any], list[list[float]]]) -> None:
    how, rows = table
    metric = PackedOverRanks(how)
    metric.update(rows[0])
    gathered: list[torch.Tensor] = []

    def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The collective of a run with as many ranks as there are rows; this one is rank 0."""
        gathered.append(tensor)
        return [tensor, *(torch.tensor(row, dtype=tensor.dtype) for row in rows[1:])]

    with metric.sync_context(dist_sync_fn=gather, distributed_available=lambda: True):
        assert torch.equal(metric.values, torch.tensor(expected(how, rows), dtype=torch.float64))
    assert [tensor.tolist() for tensor in gathered] == [rows[0]]
    assert metric.values.tolist() == rows[0]  # this rank's own again


@settings(deadline=None, max_examples=50)
@given(HOW, st.data())
def test_a_single_process_keeps_its_own_values(how: list[Any], data: st.DataObject) -> None:
    values = data.draw(st.lists(NUMBERS, min_size=len(how), max_size=len(how)))
    metric = PackedOverRanks(how)
    metric.update(values)
    assert combined_over_ranks(metric) == [(value, value, 0) for value in values]


def test_the_last_update_counts() -> None:
    metric = PackedOverRanks(["sum", "maximum"])
    metric.update([1.0, 9.0])
    metric.update([2.0, 3.0])
    assert combined_over_ranks(metric) == [(2.0, 2.0, 0), (3.0, 3.0, 0)]


def test_a_reset_forgets() -> None:
    metric = PackedOverRanks(["sum", "maximum"])
    metric.update([1.0, 9.0])
    metric.reset()
    metric.update([0.0, -1.0])
    assert [entry.value for entry in combined_over_ranks(metric)] == [0.0, -1.0]


def test_counts_of_bytes_and_tokens_stay_exact() -> None:
    large = float(2**53 - 1)
    metric = PackedOverRanks(["maximum"])
    metric.float()  # Lightning casts modules; in float32 this number would be another
    metric.update([large])
    assert [entry.value for entry in combined_over_ranks(metric)] == [large]


@pytest.mark.parametrize("how", ["maximum", "sum", "mean"])
def test_a_rank_without_a_number_is_not_hidden(how: Any) -> None:
    combined = PackedOverRanks([how])._combine(torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64))
    assert combined[0].isnan()
    assert combined[1].isnan()


def test_numbers_and_tensors_are_packed_in_order() -> None:
    counts = torch.tensor([[3, 2**40], [5, 6]])
    values = packed([1, torch.tensor(2.5), counts, 7.0, 8], "cpu")
    assert values.dtype == torch.float64
    assert values.tolist() == [1, 2.5, 3, 2**40, 5, 6, 7, 8]
    assert packed([], "cpu").numel() == 0
