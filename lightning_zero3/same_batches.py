# SPDX-License-Identifier: Apache-2.0
"""All ranks run the same number of batches, or all are told so: never a hang.

A forward under ZeRO Stage 3 gathers weights by collectives, so a rank that has run out of batches leaves the others
waiting for it, until a time-out of the process group's that explains nothing. Loaders whose lengths are exact are
compared once, when Lightning has prepared them. All others (iterable data sets, batch samplers that pack by tokens,
other libraries' loaders) are watched: for each batch, each rank says in the process group's key-value store whether it
has one, and goes on when all have answered. That is two small requests per batch, no collective, and nothing on the
GPU; Lightning draws a batch ahead, so the answer is there before the batch that some rank lacks is run.

Upstream symbols: ``Strategy.process_dataloader`` (Lightning, its place for wrapping loaders);
``torch.distributed.distributed_c10d._get_default_store`` (torch 2.8 to 2.13; a process group has no public store).
Without it there is a warning and no watch. Expires when Lightning has torch's ``Join`` for sharded models.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from lightning_zero3.loaders import length_is_exact, number_of_batches

# One answer is worth 1 if it is yes, and this if it is no: the sum tells how many of each there are.
_NO = 1 << 24
# A watched loader's own attributes; all others are those of the loader that it watches.
_OWN = frozenset({"_loader", "_store", "_prefix", "_remedy", "_timeout", "_rounds"})
# Seconds between two looks at the store: the first few at once, since ranks mostly come together.
_FIRST_LOOKS, _PAUSE = 20, 0.002
_REMEDY = (
    "Under ZeRO Stage 3 every rank must run the same number of batches, since each forward gathers weights from all "
    "ranks. Give every rank equally many: limit them by Trainer(limit_{prefix}_batches=N), split the data evenly or "
    "drop the rest{sampler}."
)
_SAMPLER = (
    ", or pad by torch's DistributedSampler with Trainer(use_distributed_sampler=False) (Lightning's own sampler for "
    "predict doesn't pad)"
)


class UnequalBatchesError(RuntimeError):
    """Ranks have different numbers of batches."""


def made_sure_of(loader: Any, module: Any, timeout: timedelta | None) -> Any:
    """Compare a loader over ranks; a collective.

    Args:
        loader: A loader that Lightning has prepared.
        module: The LightningModule, attached to its Trainer, which is in the stage that the loader is for.
        timeout: How long a rank waits for another rank's batch; None for the process group's default.

    Returns:
        The loader itself where the number of its batches is known, else one that watches it.

    Raises:
        UnequalBatchesError: The ranks' numbers of batches are known and differ.
    """
    # A CombinedLoader of the user's may hold what an earlier fit has put there.
    loader = loader._loader if isinstance(loader, WatchedLoader) else loader
    if torch.distributed.get_world_size() == 1:
        return loader
    trainer = module.trainer
    prefix = trainer.state.stage.dataloader_prefix
    batches = number_of_batches(loader, getattr(trainer, f"limit_{prefix}_batches"))
    remedy = _REMEDY.format(prefix=prefix, sampler=_SAMPLER if prefix == "predict" else "")
    return compared(loader, batches, prefix=prefix, remedy=remedy, timeout=timeout)


def compared(
    loader: Any,
    batches: int | None,
    *,
    prefix: str,
    remedy: str,
    timeout: timedelta | None,
    may_end_early: bool = False,
) -> Any:
    """Compare a loader over ranks; a collective.

    Args:
        loader: A loader as it will be iterated over.
        batches: How many batches will be drawn from it at most, or None where that isn't known.
        prefix: What messages call it.
        remedy: What a user can do, for the error.
        timeout: How long a rank waits for another rank's batch; None for the process group's default.
        may_end_early: Whether the user may stop before a loader's end, so that unequal lengths alone are no error.

    Returns:
        The loader itself where the number of its batches is known, else one that watches it.

    Raises:
        UnequalBatchesError: The ranks' numbers of batches are known and differ.
    """
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, (batches, length_is_exact(loader), uuid.uuid4().hex))
    lengths = [length for length, _, _ in answers]
    unequal = len(set(lengths)) > 1
    if unequal and not may_end_early:
        each = ", ".join(f"rank {rank}: {'no length' if n is None else n}" for rank, n in enumerate(lengths[:16]))
        raise UnequalBatchesError(
            f"The {prefix} loaders ({type(loader).__name__}) have different numbers of batches: "
            f"{each}{', …' if len(lengths) > 16 else ''}. {remedy}"
        )
    if all(exact for _, exact, _ in answers) and not unequal:
        return loader
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError) as error:
        rank_zero_warn(
            f"The {prefix} loader has no certain length and there is no store to watch it ({error}): ranks with "
            "different numbers of batches would wait for each other until the process group's time-out."
        )
        return loader
    store = PrefixStore(f"lightning_zero3/{prefix}/{answers[0][2]}", store)
    return watched_class(loader)(loader, store, prefix=prefix, remedy=remedy, timeout=timeout or default_pg_timeout)


class WatchedLoader:
    """A loader that gives a batch when every rank has one, and ends when every rank's loader ends.

    Anything but iterating is the loader's own.

    Args:
        loader: Any loader.
        store: A store of its own for this loader, shared by all ranks.
        prefix: Lightning's word for the stage: train, val, test or predict.
        remedy: What a user can do, for the error.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, loader: Any, store: Any, *, prefix: str, remedy: str, timeout: timedelta) -> None:
        self._loader = loader
        self._store = store
        self._prefix = prefix
        self._remedy = remedy
        self._timeout = timeout
        self._rounds = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy in the making
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning shuts a loader's persistent workers down, and makes it forget them by ``_iterator = None``.
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._rounds += 1
        store = PrefixStore(str(self._rounds), self._store)
        iterator, count = iter(self._loader), 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                self._all_answer(store, count, has_one=False)
                return
            self._all_answer(store, count, has_one=True)
            yield batch
            count += 1

    def _all_answer(self, store: Any, count: int, has_one: bool) -> None:
        """Say whether this rank has the batch and wait for the others.

        Raises:
            UnequalBatchesError: Some have it and some haven't, or a rank didn't answer in time.
        """
        world, key = torch.distributed.get_world_size(), str(count)
        if not has_one:
            store.set(f"end/{torch.distributed.get_rank()}", str(count))
        total = store.add(key, 1 if has_one else _NO)
        deadline, looks = time.monotonic() + self._timeout.total_seconds(), 0
        while sum(divmod(total, _NO)) < world:
            if time.monotonic() > deadline:
                raise UnequalBatchesError(
                    f"Only {sum(divmod(total, _NO))} of {world} ranks have asked for batch {count} of the "
                    f"{self._prefix} loader within {self._timeout}: the others failed, wait for data, or don't iterate "
                    "over it. Loaders whose length isn't certain must be iterated over by all ranks alike."
                )
            looks += 1
            if looks > _FIRST_LOOKS:
                time.sleep(_PAUSE)
            total = store.add(key, 0)
        without = total // _NO
        if 0 < without < world:
            ended = [rank for rank in range(world) if store.check([f"end/{rank}"])]
            raise UnequalBatchesError(
                f"The {self._prefix} loader ({type(self._loader).__name__}) has given {count} batches and ended on "
                f"rank{'s' if without > 1 else ''} {', '.join(map(str, ended[:16]))}{', …' if without > 16 else ''}; "
                f"{world - without} of {world} ranks have more. {self._remedy}"
            )
        # Whoever has answered for this batch has seen all answers for the one before.
        if count and torch.distributed.get_rank() == 0:
            store.delete_key(str(count - 1))


class WatchedStatefulLoader(WatchedLoader):
    """One whose loader has a state to be saved: from Python 3.12 on a protocol's methods must stand in the class."""

    def state_dict(self) -> Any:
        """The loader's."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The loader's.

        Args:
            state: From :meth:`state_dict`.
        """
        self._loader.load_state_dict(state)


def watched_class(loader: Any) -> type[WatchedLoader]:
    """Which class watches a loader.

    Args:
        loader: Any loader.
    """
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return WatchedStatefulLoader if stateful else WatchedLoader
