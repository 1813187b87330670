# SPDX-License-Identifier: Apache-2.0
"""Putting a tensor of Transformers' model together from what ranks hold of it: partitions, experts and slices.

A rank holds a range of the flattened elements of its own tensor, which is a box, or a few, of Transformers' one. That
is all that is needed, whatever the layout: the ranges that cover the tensor once are copied to their places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from lightning_zero3.config import SetupError
from lightning_zero3.moe.boxes import Block, Ints, boxes_of_range, strides_of

Where = TypeVar("Where")


class IncompleteWeightsError(SetupError):
    """What ranks or files hold doesn't make up a tensor; the message names it."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor.

    Args:
        shape: The rank's tensor, before ZeRO partitions it.
        start: The first of its flattened elements that this rank holds.
        stop: The first one after them.
        blocks: From the rank's tensor to Transformers'.
    """

    shape: Ints
    start: int
    stop: int
    blocks: tuple[Block, ...]

    @torch.no_grad()
    def place(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy it to where it belongs.

        Args:
            values: Its elements, 1-d and contiguous.
            whole: Transformers' tensor.

        >>> whole = torch.zeros(4, 2)
        >>> Piece((2, 2), 1, 3, (Block((0, 0), (2, 0), (2, 2)),)).place(torch.tensor([5.0, 6.0]), whole)
        >>> whole.tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 5.0], [6.0, 0.0]]
        """
        strides = strides_of(self.shape)
        for start, size in boxes_of_range(self.shape, self.start, self.stop):
            for block in self.blocks:
                box = block.within(start, size)
                if box is None:
                    continue
                offset = sum(h * stride for h, stride in zip(box.here, strides, strict=True)) - self.start
                there = tuple(slice(t, t + n) for t, n in zip(box.there, box.size, strict=True))
                whole[there].copy_(values.as_strided(box.size, strides, values.storage_offset() + offset))


@dataclass(frozen=True)
class Held(Generic[Where]):
    """A piece, and where it is to be had.

    Args:
        where: A rank, or a place in a file.
        piece: The piece.
    """

    where: Where
    piece: Piece


def covering(name: str, shape: Sequence[int], held: Sequence[Held[Where]]) -> list[Held[Where]]:
    """Of all that is held of a tensor, what makes it up once; what several ranks hold is taken from the first.

    Args:
        name: What a message calls it.
        shape: Transformers' tensor.
        held: Everything that is held of it.

    Raises:
        IncompleteWeightsError: There is too little, or ranges overlap.
    """
    once: dict[Piece, Held[Where]] = {}
    for each in held:
        if each.piece.start < each.piece.stop:
            once.setdefault(each.piece, each)
    found = sum(piece.stop - piece.start for piece in once)
    if found != math.prod(shape):
        raise IncompleteWeightsError(
            f"{name} has {math.prod(shape):,} elements, {'x'.join(map(str, shape))}, and {found:,} are held of it."
        )
    return list(once.values())
