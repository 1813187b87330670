# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors: which part of one tensor is which part of another, and which a range of flattened elements covers.

Everything about layouts of weights comes down to this: an expert is a box of a fused tensor, a rank's slice of a layer
is a box of the whole weight, and a ZeRO partition is a range of the flattened slice. Integer arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A box of one tensor that is a box of another.

    Args:
        here: Where it begins in the one.
        there: Where it begins in the other.
        size: Its size in both.
    """

    here: Ints
    there: Ints
    size: Ints

    @classmethod
    def of_all(cls, shape: Sequence[int]) -> Block:
        """A tensor that is the other."""
        zeros = (0,) * len(shape)
        return cls(zeros, zeros, tuple(shape))

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.size)

    def turned(self) -> Block:
        """The same, looked at from the other tensor.

        >>> Block((0, 0), (4, 0), (2, 3)).turned()
        Block(here=(4, 0), there=(0, 0), size=(2, 3))
        """
        return Block(self.there, self.here, self.size)

    def within(self, start: Sequence[int], size: Sequence[int]) -> Block | None:
        """The part of it that lies in a box of the one tensor.

        Args:
            start: Where the box begins.
            size: Its size.

        Returns:
            The part, or None.

        >>> Block((0, 0), (4, 0), (2, 3)).within((1, 0), (5, 2))
        Block(here=(1, 0), there=(5, 0), size=(1, 2))
        """
        first = tuple(max(a, b) for a, b in zip(self.here, start, strict=True))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(self.here, self.size, start, size, strict=True))
        if any(end <= begin for begin, end in zip(first, last, strict=True)):
            return None
        there = tuple(t + f - h for t, f, h in zip(self.there, first, self.here, strict=True))
        return Block(first, there, tuple(end - begin for begin, end in zip(first, last, strict=True)))

    def then(self, other: Block) -> Block | None:
        """From the one tensor, by way of the other, to a third.

        Args:
            other: From the other tensor to the third.

        Returns:
            What they have in common, from the one to the third, or None.

        >>> Block((0, 0), (4, 0), (2, 3)).then(Block((5, 0), (0, 0), (9, 9)))
        Block(here=(1, 0), there=(0, 0), size=(1, 3))
        """
        middle = self.turned().within(other.here, other.size)
        if middle is None:
            return None
        there = tuple(t + f - h for t, f, h in zip(other.there, middle.here, other.here, strict=True))
        return Block(middle.there, there, middle.size)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[tuple[Ints, Ints]]:
    """The boxes that a range of a tensor's flattened elements is made of: at most two for each dimension, less one.

    Args:
        shape: The tensor's.
        start: The range's first element.
        stop: The first one after it.

    Returns:
        Start and size of each, in order.

    >>> boxes_of_range((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    >>> boxes_of_range((4, 3), 3, 9)
    [((1, 0), (2, 3))]
    >>> boxes_of_range((), 0, 1)
    [((), ())]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    boxes = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return boxes + (_in_row(shape, last, 0, stop - last * row) if stop > last * row else [])


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[tuple[Ints, Ints]]:
    return [((row, *begin), (1, *size)) for begin, size in boxes_of_range(shape[1:], start, stop)]


def strides_of(shape: Sequence[int]) -> Ints:
    """How many elements apart neighbours in each dimension are, in a contiguous tensor.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
