# SPDX-License-Identifier: Apache-2.0
"""One tool for the few places where upstream has no hook: a name replaced for the length of a call, then put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


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
    getattr(owner, name)
    # What stands in the owner's own dict, not what attribute access makes of it: a static method must come back as
    # one, and an inherited name must not stay behind as a copy.
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
