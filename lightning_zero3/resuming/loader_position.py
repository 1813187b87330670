# SPDX-License-Identifier: Apache-2.0
"""A resume in the middle of an epoch: the loader goes on with the batch that comes next.

Lightning does that for loaders with ``state_dict`` and ``load_state_dict``, and begins any other anew. Where an epoch's
order follows from the epoch's number alone, as with the ``DistributedSampler`` that Lightning puts into a plain
``DataLoader``, a position is a number of batches, and those before it needn't be read.

Upstream symbols: ``DataLoader.batch_sampler`` (torch), which can't be set on a loader and is put into its ``__dict__``;
``_set_sampler_epoch`` (Lightning 2.6.6), which its resume calls after workers have begun to draw indices;
``CombinedLoader._iterator`` and its ``iterators``. Detected by
tests. Expires when Lightning gives a plain loader its position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

# Whose order follows from seed and epoch. Exactly these classes: a subclass may do as it likes.
_SAMPLERS = (DistributedSampler, SequentialSampler)


class _FromBatch:
    """A batch sampler whose first pass begins later; anything else is the batch sampler's own.

    Args:
        batch_sampler: The loader's.
        first: Index of the batch that its next pass begins with.
    """

    def __init__(self, batch_sampler: Any, first: int) -> None:
        # Lightning's name for what a wrapper wraps.
        self._batch_sampler = batch_sampler
        self._first = first

    def begin_anew(self) -> None:
        """The epoch that went on has ended, perhaps before another of its batches was asked for."""
        self._first = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":  # a copy in the making
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        # When the first is asked for: torch makes an iterator that it throws away where there are workers.
        first, self._first = self._first, 0
        yield from islice(iter(self._batch_sampler), first, None)


def go_on(combined_loader: Any, *, epoch: int, batch: int) -> Callable[[], None] | None:
    """Have a resumed fit's loaders begin where the checkpoint was saved; warn where that isn't possible.

    Args:
        combined_loader: Lightning's, with loaders that have loaded their own states, before it is iterated over.
        epoch: The epoch that goes on.
        batch: Its batches that are through.

    Returns:
        What is to be called when that epoch has ended, if anything.
    """
    loaders = combined_loader.flattened
    for loader in loaders:
        _set_sampler_epoch(loader, epoch)
    others = [loader for loader in loaders if not isinstance(loader, _Stateful)]
    if not batch or not others:
        return None
    loader = others[0]
    # Beside another loader it may have been through several times.
    why = "is one of several" if len(loaders) > 1 else _why_not(loader)
    if why is None:
        wrapped = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
        vars(loader)["batch_sampler"] = later = _FromBatch(wrapped, batch)
        return later.begin_anew
    rank_zero_warn(
        f"This checkpoint was saved after {batch} batches of epoch {epoch}, and the training loader "
        f"({type(loader).__name__}) can't go on there: it {why}. It begins anew, so this run isn't the uninterrupted "
        "one. Use a loader with state_dict and load_state_dict (torchdata's StatefulDataLoader), leave the sampler to "
        "Lightning (DataLoader(shuffle=True), which gets a DistributedSampler), or resume from a checkpoint of an "
        "epoch's end."
    )
    return None


def generators_of(data_fetcher: Any) -> list[int]:
    """Which loaders' iterators are generators, so that nothing of them has run before their first batch is asked for.

    Args:
        data_fetcher: Lightning's, in the middle of its iteration.
    """
    iterators = _iterators(data_fetcher)
    return [index for index, iterator in enumerate(iterators) if inspect.isgenerator(iterator)]


def begin(data_fetcher: Any) -> None:
    """Have generators find their place and draw their first batch now; it is given when it is asked for.

    Args:
        data_fetcher: Lightning's, before its first batch.
    """
    iterators = _iterators(data_fetcher)
    for index in generators_of(data_fetcher):
        iterator = iterators[index]
        iterators[index] = chain(list(islice(iterator, 1)), iterator)


def _iterators(data_fetcher: Any) -> list[Any]:
    iterators: list[Any] = getattr(data_fetcher.combined_loader._iterator, "iterators", [])
    return iterators


def _why_not(loader: Any) -> str | None:
    if not isinstance(loader, DataLoader):
        return "has no state_dict"
    if isinstance(loader.dataset, IterableDataset):
        return "has no state_dict, and its data set is iterable"
    batches = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    if type(batches) is not BatchSampler:
        return f"has no state_dict, and the order of {type(batches).__name__} isn't known"
    if type(loader.sampler) not in _SAMPLERS:
        return f"has no state_dict, and the order of {type(loader.sampler).__name__} isn't known"
    return None
