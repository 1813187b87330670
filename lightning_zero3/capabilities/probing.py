# SPDX-License-Identifier: Apache-2.0
"""How to find out what the installed packages do: what a method's code calls and refers to, and in which order."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class UpstreamFix:
    """One fault or gap upstream that this package handles until upstream does.

    Args:
        name: The switch or part that handles it.
        symbol: The upstream symbol.
        reason: What is wrong there.
        affected: Releases in which it was seen.
        mended: Reads the given upstream class and tells whether upstream has the fix.
        hooks: Pairs of an upstream method and a method that it must call for our part to work. A tuple of callers
            means any one of them.
        expires: What makes our part superfluous.
        order: Methods that upstream's ``step`` must call once each, in this order.
        uses: Names that upstream's code must refer to: a function that finds the code, and the names.
    """

    name: str
    symbol: str
    reason: str
    affected: str
    mended: Callable[[type[Any]], bool]
    hooks: tuple[tuple[tuple[str, ...], str], ...]
    expires: str
    order: tuple[str, ...] = ()
    uses: tuple[tuple[Callable[[type[Any]], Callable[..., Any]], tuple[str, ...]], ...] = ()

    def missing_hooks(self, stage3: type[Any]) -> list[str]:
        """Calls that this part relies on and the given class doesn't make, in words."""
        return [what for what, found in self.looked_for(stage3) if not found]

    def looked_for(self, stage3: type[Any]) -> list[tuple[str, bool]]:
        """What this part relies on, in words, each with whether the given class's code has it."""
        seen = [
            (
                f"{' or '.join(callers)} calling {callee}",
                hasattr(stage3, callee) and any(_calls(stage3, caller, callee) for caller in callers),
            )
            for callers, callee in self.hooks
        ]
        if self.order:
            in_order = calls_among(stage3.step, self.order) == list(self.order)
            seen.append((f"step calling {', '.join(self.order)} once each and in this order", in_order))
        for find, names in self.uses:
            try:
                referenced = referenced_names(find(stage3))
            except AttributeError as error:
                seen.append((f"a use of {error}", False))
                continue
            seen += [(f"a use of {name}", name in referenced) for name in names]
        return seen


def not_mended(stage3: type[Any]) -> bool:  # noqa: ARG001
    """No release has it yet, so there is nothing to tell it by; having it twice would do no harm."""
    return False


def referenced_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names that a function's code refers to, nested functions included.

    DeepSpeed's ``instrument_w_nvtx`` wraps without setting ``__wrapped__``, so the wrapped function is taken out of
    the wrapper's closure.

    >>> def outer():
    ...     return len([abs(n) for n in ()])
    >>> sorted(referenced_names(outer) & {"len", "abs", "sum"})
    ['abs', 'len']
    """
    names: set[str] = set()
    pending: list[CodeType] = [unwrapped(function).__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names)


def calls_among(function: Callable[..., Any], methods: Collection[str]) -> list[str]:
    """Which of some methods a function's own code looks up, as often and in the order in which it does.

    >>> def outer(self):
    ...     self.a()
    ...     for _ in range(3):
    ...         self.b(self.c)
    >>> calls_among(outer, {"a", "b", "c"})
    ['a', 'b', 'c']
    """
    return [
        instruction.argval
        for instruction in dis.get_instructions(unwrapped(function))
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in methods
    ]


def unwrapped(function: Callable[..., Any]) -> FunctionType:
    """The function that decorators have wrapped.

    Args:
        function: A method of an upstream class.

    Raises:
        TypeError: It is no Python function.
    """
    found: Any = inspect.unwrap(function)
    while getattr(found, "__name__", "") == "wrapped_fn" and found.__closure__:
        inner = [cell.cell_contents for cell in found.__closure__ if inspect.isfunction(cell.cell_contents)]
        if len(inner) != 1:
            break
        found = inspect.unwrap(inner[0])
    if not inspect.isfunction(found):
        raise TypeError(f"{function!r} is no Python function, so its code can't be read.")
    return found


def _calls(stage3: type[Any], caller: str, callee: str) -> bool:
    return hasattr(stage3, caller) and callee in referenced_names(getattr(stage3, caller))


@dataclass(frozen=True)
class UpstreamLimit:
    """Something that the installed packages can't do, so that we refuse it or do it in another way.

    Args:
        name: A short name.
        symbol: The upstream symbol.
        reason: What is missing or doesn't fit.
        affected: Releases in which it was seen.
        present: Probes the installed packages.
        consequence: What a user is told, or what we do instead.
        expires: What ends it.
        mended_here: Whether what we do instead leaves users nothing to do.
    """

    name: str
    symbol: str
    reason: str
    affected: str
    present: Callable[[], bool]
    consequence: str
    expires: str
    mended_here: bool = False
