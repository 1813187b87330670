# SPDX-License-Identifier: Apache-2.0
"""What a user runs under a scheduler: a fit that sends itself a signal, as a scheduler would, and prints what happened.

Arguments: a JSON object with ``folder``, ``number`` (a signal's, or null), ``rank`` that gets it (or "all"), ``at``
("train" or "validate"), ``batch``, the index among all batches of that kind at which it comes, and ``options`` for
:func:`tests.resumes.fitted`.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch

from tests.resumes import Traced, fitted


class Signal(pl.Callback):
    """From within the process, so that it comes at one place; by the kernel, as any other."""

    def __init__(self, number: int | None, rank: int | str, at: str, batch: int) -> None:
        self.number, self.rank, self.at, self.batch = number, rank, at, batch
        self.seen = 0

    def _batch(self, trainer: Any, kind: str) -> None:
        if kind != self.at or self.number is None:
            return
        if self.seen == self.batch and self.rank in ("all", trainer.global_rank):
            os.kill(os.getpid(), self.number)
        self.seen += 1

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._batch(trainer, "train")

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self._batch(trainer, "validate")


@contextmanager
def counted_notes() -> Iterator[list[int]]:
    """What this rank says when the ranks ask each other for signals."""
    notes: list[int] = []
    reduce = torch.distributed.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if torch.distributed.ReduceOp.MAX in (*arguments, named.get("op")) and tensor.dtype == torch.int64:
            notes.append(int(tensor))
        return reduce(tensor, *arguments, **named)

    torch.distributed.all_reduce = all_reduce
    try:
        yield notes
    finally:
        torch.distributed.all_reduce = reduce


def main(asked: dict[str, Any]) -> None:
    """Fit as asked."""
    events: list[Any] = []
    note = Traced.note

    def noted(self: Traced, *what: Any) -> None:
        note(self, *what)
        events.append(self.events[-1])

    Traced.note = noted  # type: ignore[method-assign]
    try:
        signal = Signal(asked["number"], asked["rank"], asked["at"], asked["batch"])
        fitted(None, None, default_root_dir=asked["folder"], callbacks=lambda: [signal], **asked["options"])
    finally:
        sys.stdout.write(f"\nRESULT {json.dumps({'rank': int(os.environ['SLURM_PROCID']), 'events': events})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
