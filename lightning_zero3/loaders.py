# SPDX-License-Identifier: Apache-2.0
"""What is known of a data loader before a batch is drawn: its batch size, and how many batches it gives."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# Samplers whose length is the number of samples that they give. Exactly these classes: a subclass may do as it likes.
_EXACT_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_LIGHTNINGS_SAMPLERS = ("lightning.pytorch.overrides.distributed", "pytorch_lightning.overrides.distributed")


def micro_batch_size(module: Any) -> int:
    """The training loader's batch size, for DeepSpeed's own throughput figures; 1 where it has none.

    Upstream symbol: ``DeepSpeedStrategy._auto_select_batch_size`` (Lightning 2.6.6), which fails on loaders without a
    batch sampler (``batch_size=None``), on batch samplers without a ``batch_size`` and on a ``CombinedLoader``. Since
    it calls ``train_dataloader`` once more than a plain Trainer does, it also moves the random state wherever that
    draws from it (``random_split``). Expires when Lightning does neither.

    Args:
        module: A LightningModule that is attached to its Trainer.

    Returns:
        A positive number.
    """
    source = module.trainer.fit_loop._data_source
    if not source.is_defined():
        return 1
    with isolate_rng(include_cuda=False):
        loader = source.dataloader()
    for holder in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 1


def number_of_batches(loader: Any, limit: float | int) -> int | None:
    """How many batches Lightning draws from a loader at most, or None where it has no length.

    Args:
        loader: A data loader.
        limit: The Trainer's ``limit_*_batches``.

    >>> number_of_batches([1, 2, 3], 1.0), number_of_batches([1, 2, 3], 2), number_of_batches(iter([1]), 2)
    (3, 2, None)
    """
    length = sized_len(loader)
    if length is None:
        return None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def length_is_exact(loader: Any) -> bool:
    """Whether a loader's length is sure to be the number of batches that it gives.

    Args:
        loader: One that Lightning has prepared.

    Returns:
        False for iterable data sets, samplers of the user's own, and other libraries' loaders.

    >>> length_is_exact(DataLoader([1, 2, 3], batch_size=2))
    True
    >>> length_is_exact(iter([1, 2]))
    False
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # Lightning's wrapper records indices for predict.
    batches = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    if batches is not None and type(batches) is not BatchSampler:
        return False
    # Lightning's distributed samplers have the length of what they wrap, which they draw as a list.
    sampler = getattr(getattr(loader.sampler, "dataset", None), "_sampler", loader.sampler)
    return type(sampler) in _EXACT_SAMPLERS or type(sampler).__module__ in _LIGHTNINGS_SAMPLERS
