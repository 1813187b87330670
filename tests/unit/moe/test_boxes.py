# SPDX-License-Identifier: Apache-2.0
"""Boxes and ranges against torch's own indexing."""

import math
import random

import pytest
import torch

from lightning_zero3.moe.boxes import Block, boxes_of_range, strides_of

SHAPES = [(), (1,), (7,), (3, 5), (4, 1, 6), (2, 3, 4), (1, 1, 1), (2, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_range_is_its_boxes_and_nothing_twice(shape):
    numel = math.prod(shape)
    numbered = torch.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = boxes_of_range(shape, start, stop)
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            found = [numbered[tuple(slice(b, b + n) for b, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
            assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))


def test_strides():
    assert all(strides_of(shape) == torch.empty(shape).stride() for shape in SHAPES)


def test_blocks_in_a_row_are_what_indexing_twice_gives():
    rng = random.Random(0)
    for _ in range(300):
        first, second, third = (torch.zeros(6, 6, dtype=torch.long) for _ in range(3))
        third.copy_(torch.arange(1, 37).reshape(6, 6))

        def block() -> Block:
            size = tuple(rng.randint(1, 5) for _ in range(2))
            return Block(*(tuple(rng.randint(0, 6 - n) for n in size) for _ in range(2)), size)

        one, two = block(), block()

        def box(start, size):
            return tuple(slice(b, b + n) for b, n in zip(start, size, strict=True))

        second[box(two.here, two.size)] = third[box(two.there, two.size)]
        first[box(one.here, one.size)] = second[box(one.there, one.size)]
        direct, joined = torch.zeros_like(first), one.then(two)
        if joined is not None:
            direct[box(joined.here, joined.size)] = third[box(joined.there, joined.size)]
        assert torch.equal(direct, first)
