# SPDX-License-Identifier: Apache-2.0
"""How many tokens a batch holds, for the forms of batches that data loaders give."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from lightning_zero3.metrics.throughput import tokens_in

IDS = torch.zeros(2, 8, dtype=torch.long)


class Pair(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        {"input_ids": IDS},
        {"labels": IDS[:1], "input_ids": IDS, "attention_mask": torch.ones(2, 8)},
        BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones(2, 8)}),
        (IDS, IDS[:1]),
        [IDS, IDS[:1]],
        Pair(IDS, IDS[:1]),
        [{"input_ids": IDS}, torch.ones(3)],
    ],
    ids=["tensor", "dict", "dict with more", "tokenizer's", "tuple", "list", "named tuple", "dict in a list"],
)
def test_token_ids_are_found(batch: Any) -> None:
    assert tokens_in(batch) == 16


@pytest.mark.parametrize(
    "batch",
    [
        None,
        "some text",
        17,
        [],
        (),
        {},
        {"pixel_values": torch.ones(2, 3)},
        {"input_ids": torch.ones(2, 8)},
        {"input_ids": None},
        torch.ones(2, 8),
        torch.ones(2, 8, dtype=torch.bfloat16),
        torch.ones(2, 8, dtype=torch.bool),
        (torch.ones(2, 3, 4, 4), torch.tensor([1, 2])),
        ["some", "text"],
        [[1, 2, 3]],
    ],
    ids=repr,
)
def test_other_batches_have_no_number_of_tokens(batch: Any) -> None:
    assert tokens_in(batch) is None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]),
)
def test_the_number_is_of_all_elements_whatever_the_shape_and_integer_type(
    shape: list[int], dtype: torch.dtype
) -> None:
    expected = 1
    for size in shape:
        expected *= size
    assert tokens_in({"input_ids": torch.zeros(shape, dtype=dtype)}) == expected


def test_padding_counts() -> None:
    padded = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]])
    assert tokens_in({"input_ids": padded, "attention_mask": (padded > 0).long()}) == 8


def test_a_list_of_samples_under_input_ids_is_not_counted_by_its_first() -> None:
    unpadded = {"input_ids": [torch.zeros(3, dtype=torch.long), torch.zeros(5, dtype=torch.long)]}
    assert tokens_in(unpadded) in (None, 8)
