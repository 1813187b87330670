"""One tool for the few places where upstream has no hook: a name replaced for the length of a call, then put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def substituted(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace ``owner.name`` inside the block and restore it afterwards, whatever happens inside.

    Args:
        owner: The module, class or instance that holds the name.
        name: An attribute that exists already; a name that upstream dropped must not pass unnoticed.
        replacement: What stands there inside the block.

    Raises:
        AttributeError: ``owner`` has no such name.

    >>> import math
    >>> with substituted(math, "tau", 6):
    ...     math.tau
    6
    >>> round(math.tau, 2)
    6.28
    """
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
