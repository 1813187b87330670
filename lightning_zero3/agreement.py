# SPDX-License-Identifier: Apache-2.0
"""A verdict that all ranks share: none goes on while another refuses, and none waits for one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Told = tuple[type[Exception], str]


def exchanged(work: Callable[[], T], group: Any = None) -> list[tuple[T, Told | None]]:
    """Do something on every rank, and tell all how it went; one small collective.

    Args:
        work: Without collectives of its own. What it returns is pickled and sent to all ranks.
        group: Who takes part; None for all.

    Returns:
        By rank what it has returned, and class and text of what it has raised. Whoever has raised doesn't return.

    Raises:
        Exception: What ``work`` has raised here, after the others were told.
    """
    failure: Exception | None = None
    value: Any = None
    try:
        value = work()
    except Exception as error:
        failure = error
    answers: list[Any] = [(value, _told(failure))]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        mine = (None if failure else value, _told(failure))
        answers = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(answers, mine, group)
    if failure is not None:
        raise failure
    return answers


def together(work: Callable[[], T]) -> list[T]:
    """:func:`exchanged`, and on only if it succeeded on each rank.

    Args:
        work: As there.

    Returns:
        What it has returned, by rank.

    Raises:
        Exception: Where ``work`` raised, that; on the other ranks one of the same class and text.
    """
    answers = exchanged(work)
    for rank, (_, told) in enumerate(answers):
        if told is not None:
            kind, text = told
            raise kind(f"On rank {rank}: {text}")
    return [each for each, _ in answers]


def _told(failure: Exception | None) -> Told | None:
    if failure is None:
        return None
    kind = type(failure)
    # Others' exceptions may want other arguments than a text.
    return (kind if kind.__module__.startswith("lightning_zero3.") else RuntimeError), str(failure)
