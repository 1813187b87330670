# SPDX-License-Identifier: Apache-2.0
"""How messages list names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    Args:
        names: Any.
        most: How many are named.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    >>> first_few(["a", "b"], 2)
    'a, b'
    """
    return f"{', '.join(names[:most])}{f' and {len(names) - most} more' if len(names) > most else ''}"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """The first names, and a sign that there are more.

    Args:
        names: Any.
        most: How many are named.

    >>> shortened(["a", "b", "c"], 2)
    'a, b, …'
    """
    return f"{', '.join(names[:most])}{', …' if len(names) > most else ''}"


def by_kind(kinds: Iterable[tuple[str, Sequence[str]]]) -> str:
    """:func:`first_few` of each kind that there is any of.

    Args:
        kinds: What is wrong with them, and their names.

    >>> by_kind([("missing", ["a"]), ("unknown", []), ("twice", ["b", "c"])])
    'missing: a; twice: b, c'
    """
    return "; ".join(f"{what}: {first_few(names)}" for what, names in kinds if names)
