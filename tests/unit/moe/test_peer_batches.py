# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of batches: alike for equal tensors wherever they lie, unlike for any difference that a model sees."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from lightning_zero3.moe.peer_batches import fingerprint


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: torch.Tensor


IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS.clone()},
        (IDS.clone(), "a name", 3, None),
        [{"deep": (IDS.clone(),)}],
        BatchEncoding({"input_ids": IDS.clone()}),
        Sample(IDS.clone()),
        {"not contiguous": IDS.t().contiguous().t()},
    ],
    ids=["dict", "tuple", "nested", "encoding", "dataclass", "strides"],
)
def test_equal_tensors_have_one_fingerprint_in_any_container(batch: Any) -> None:
    assert fingerprint(batch) == fingerprint(IDS) == ("int64 (2, 3)", fingerprint([IDS])[1])


@pytest.mark.parametrize(
    "batch",
    [
        IDS + 1,
        IDS.flip(0),
        IDS.reshape(3, 2),
        IDS.int(),
        (IDS, IDS),
        (IDS, torch.zeros(0)),
        None,
        IDS.to_sparse(),
        torch.nested.nested_tensor([IDS[0], IDS[1]], layout=torch.jagged),
    ],
    ids=["values", "order", "shape", "dtype", "one more", "an empty one", "nothing", "sparse", "nested"],
)
def test_any_difference_shows(batch: Any) -> None:
    assert fingerprint(batch)[1] != fingerprint(IDS)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16])
def test_every_dtype_has_bits(dtype: torch.dtype) -> None:
    words, digest = fingerprint(torch.zeros((), dtype=dtype))
    assert words == f"{str(dtype)[6:]} ()"
    assert digest != fingerprint(torch.ones((), dtype=dtype))[1]


def test_words_name_the_first_tensors_and_the_hash_has_all() -> None:
    words, digest = fingerprint([IDS] * 9)
    assert words.count("int64") == 8
    assert words.endswith(", …")
    assert digest != fingerprint([*[IDS] * 8, IDS + 1])[1]
    assert fingerprint({})[0] == "no tensors"
