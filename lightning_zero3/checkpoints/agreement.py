"""A verdict that all ranks share: none goes on while another refuses, and none waits for one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def together(work: Callable[[], T]) -> list[T]:
    """Do something on every rank, and go on only if it succeeded on each; one small collective.

    Args:
        work: Without collectives of its own. What it returns is pickled and sent to all ranks.

    Returns:
        What it has returned, by rank.

    Raises:
        Exception: Where ``work`` raised, that; on the other ranks one of the same class and text.
    """
    failure: Exception | None = None
    value: Any = None
    try:
        value = work()
    except Exception as error:
        failure = error
    if not torch.distributed.is_initialized():
        answers = [(value, _told(failure))]
    else:
        answers = [None] * torch.distributed.get_world_size()  # type: ignore[list-item]
        torch.distributed.all_gather_object(answers, (None if failure else value, _told(failure)))
    if failure is not None:
        raise failure
    for rank, (_, told) in enumerate(answers):
        if told is not None:
            kind, text = told
            raise kind(f"On rank {rank}: {text}")
    return [each for each, _ in answers]


def _told(failure: Exception | None) -> tuple[type[Exception], str] | None:
    if failure is None:
        return None
    kind = type(failure)
    # Others' exceptions may want other arguments than a text.
    return (kind if kind.__module__.startswith("lightning_zero3.") else RuntimeError), str(failure)
