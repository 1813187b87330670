# SPDX-License-Identifier: Apache-2.0
"""Loaders of every kind train as under a plain Trainer; unequal numbers of batches are an error on all ranks."""

import inspect
import itertools
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero3 import UnequalBatchesError, UnsupportedFeatureError, Zero3FastStrategy
from lightning_zero3.same_batches import WatchedLoader, watched_class
from tests.fits import QUIET, Pairs, Regression

OPTIONS = {**QUIET, "max_epochs": 2}
DATA = Pairs(length=48)


class Stream(IterableDataset):
    """Samples of a slice of the data, without a length."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Any:
        return (DATA[k] for k in range(self.start, self.stop))


class Sized(Stream):
    """Says that it has 5 samples, whatever it has."""

    def __len__(self) -> int:
        return 5


class Packed:
    """A batch sampler without a batch size, with batches of several sizes and a length that isn't theirs."""

    def __init__(self, start: int, batches: int, length: int | None = None) -> None:
        self.start, self.batches, self.length = start, batches, batches if length is None else length

    def __iter__(self) -> Any:
        return ([self.start + 2 * k, self.start + 2 * k + 1] for k in range(self.batches))

    def __len__(self) -> int:
        return self.length


class Foreign:
    """A loader of another library: it can be iterated over, and that is all."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Any:
        return iter(DataLoader(Stream(self.start, self.stop), batch_size=2))


class Batches:
    """Not a list, which Lightning takes for several loaders."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def first(samples: int) -> DataLoader:
    return DataLoader(torch.utils.data.Subset(DATA, range(samples)), batch_size=2)


class Module(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = batch["a"]
        elif isinstance(batch[0], list | tuple):
            batch = batch[1]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += 1
        x, y = batch
        self.log("val", ((self.net(x) - y) ** 2).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def ours(**options: Any) -> pl.Trainer:
    zero = {"stage": 3, "sub_group_size": 100, "stage3_param_persistence_threshold": 20}
    strategy = Zero3FastStrategy({"zero_optimization": zero})
    options = {"use_distributed_sampler": False, **options}
    return pl.Trainer(strategy=strategy, devices=torch.distributed.get_world_size(), **{**OPTIONS, **options})


# Name → the loader of one rank, which has `count` samples from `start` on; batches of 2, of 1 where it says so.
KINDS: dict[str, Any] = {
    "no automatic batching": lambda start, count: DataLoader(
        torch.utils.data.StackDataset(
            [DATA.x[k : k + 2] for k in range(start, start + count, 2)],
            [DATA.y[k : k + 2] for k in range(start, start + count, 2)],
        ),
        batch_size=None,
    ),
    "stream": lambda start, count: DataLoader(Stream(start, start + count), batch_size=2),
    "stream without batching": lambda start, count: DataLoader(
        [(DATA.x[k : k + 2], DATA.y[k : k + 2]) for k in range(start, start + count, 2)], batch_size=None
    ),
    "packed": lambda start, count: DataLoader(DATA, batch_sampler=Packed(start, count // 2)),
    "foreign": lambda start, count: Foreign(start, start + count),
    "batches": lambda start, count: Batches(DataLoader(Stream(start, start + count), batch_size=2)),
    "dict": lambda start, count: {
        "a": DataLoader(Stream(start, start + count), batch_size=2),
        "b": first(8),
    },
    "combined": lambda start, count: CombinedLoader(
        [DataLoader(DATA, batch_size=5), DataLoader(Stream(start, start + count), batch_size=2)], "min_size"
    ),
}


def trains(kind: str) -> list[float]:
    """Two epochs over each rank's 12 samples: the losses."""
    module = Module()
    trainer = ours()
    trainer.fit(module, KINDS[kind](12 * torch.distributed.get_rank(), 12))
    assert trainer.global_step == 12
    return module.losses


def reference(world_size: int) -> list[list[float]]:
    """The same by a plain Trainer with the same global batches."""
    batches = []
    for step in range(6):
        indices = [12 * rank + 2 * step + k for rank in range(world_size) for k in range(2)]
        batches.append((DATA.x[indices], DATA.y[indices]))

    class ByRank(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            parts = ((self.net(x) - y) ** 2).view(world_size, -1).mean(1)
            self.losses.append(parts.tolist())
            return parts.mean()

    module = ByRank()
    pl.Trainer(strategy="auto", devices=1, **OPTIONS).fit(module, Batches(batches))
    return [list(losses) for losses in zip(*module.losses, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_loaders_of_every_kind_train_as_under_a_plain_trainer(ranks, world_size):
    expected = ranks(1).run(reference, world_size)[0]
    for kind in KINDS:
        seen = ranks(world_size).run(trains, kind)
        for losses, wanted in zip(seen, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=2e-6), kind


def unequal(case: str) -> tuple[str, int, float]:
    """What each rank is told, the batches it has run, and after how many seconds."""
    rank = torch.distributed.get_rank()
    module, trainer, began = Module(), ours(num_sanity_val_steps=0), time.monotonic()
    train: Any = DataLoader(Stream(0, 12), batch_size=2)

    def val(*counts: int) -> list[Any]:
        return [DataLoader(Stream(0, 2 * count), batch_size=2) for count in counts]

    fits: dict[str, Any] = {
        "stream": lambda: trainer.fit(module, DataLoader(Stream(0, 12 - 4 * rank), batch_size=2)),
        "no batches": lambda: trainer.fit(module, DataLoader(Stream(0, 12 * rank), batch_size=2)),
        "said to be equal": lambda: trainer.fit(module, DataLoader(Sized(0, 4 + 2 * rank), batch_size=2)),
        "packed": lambda: trainer.fit(module, DataLoader(DATA, batch_sampler=Packed(0, 4 - rank, 4))),
        "foreign": lambda: trainer.fit(module, Foreign(0, 6 + 2 * rank)),
        "lengths": lambda: trainer.fit(module, first(10 - 2 * rank)),
        "length on one rank": lambda: trainer.fit(module, train if rank else first(12)),
        "validation": lambda: trainer.fit(module, train, val(2 + rank)),
        "second validation": lambda: trainer.fit(module, train, val(2, 3 - rank)),
        "validation lengths": lambda: trainer.fit(module, train, first(10 - 2 * rank)),
        "predict": lambda: ours(use_distributed_sampler=True).predict(
            module, DataLoader(torch.utils.data.Subset(DATA, range(3)), batch_size=1)
        ),
    }
    with pytest.raises(UnequalBatchesError) as caught:
        fits[case]()
    return str(caught.value), len(module.losses), time.monotonic() - began


CASES = {
    # What is said, and how many training batches both ranks have run.
    "stream": ("The train loader (DataLoader) has given 4 batches and ended on rank 1; 1 of 2 ranks have more.", 3),
    "no batches": ("The train loader (DataLoader) has given 0 batches and ended on rank 0", 0),
    "said to be equal": ("has given 2 batches and ended on rank 0", 2),
    "packed": ("has given 3 batches and ended on rank 1", 3),
    "foreign": ("The train loader (Foreign) has given 3 batches and ended on rank 0", 2),
    "lengths": ("The train loaders (DataLoader) have different numbers of batches: rank 0: 5, rank 1: 4.", 0),
    "length on one rank": ("rank 0: 6, rank 1: no length", 0),
    "validation": ("The val loader (DataLoader) has given 2 batches and ended on rank 0", 6),
    "second validation": ("The val loader (DataLoader) has given 2 batches and ended on rank 1", 6),
    "validation lengths": ("The val loaders (DataLoader) have different numbers of batches: rank 0: 5, rank 1: 4.", 0),
    "predict": ("rank 0: 2, rank 1: 1. Under ZeRO Stage 3 every rank must run the same number", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_unequal_numbers_of_batches_are_explained_on_all_ranks(ranks, case):
    said, batches = CASES[case]
    for message, run, seconds in ranks(2).run(unequal, case):
        assert said in message
        assert "limit_" in message
        assert run == batches
        assert seconds < 10


def remedies() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    module = Module()
    limited = ours(limit_train_batches=4, limit_val_batches=2)
    stream = DataLoader(Stream(0, 12 - 4 * rank), batch_size=2)
    limited.fit(module, stream, first(10 - 2 * rank))
    flagged = Module()
    flagged.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(UnsupportedFeatureError, match=r"Module\.allow_zero_length"):
        ours().fit(flagged, stream)
    return {"steps": limited.global_step, "validated": module.validated}


def test_the_remedies_work(ranks):
    for seen in ranks(2).run(remedies):
        assert seen == {"steps": 8, "validated": 2 + 2 * 2}


def alone() -> tuple[str, int, list[Any]]:
    """A rank that iterates by itself is told so; a loader's own attributes are still there; keys don't pile up."""
    store = torch.distributed.HashStore()
    options: dict[str, Any] = {"prefix": "val", "remedy": "", "timeout": timedelta(seconds=0.2)}
    inner = DataLoader(Stream(0, 8), batch_size=2)
    watched = WatchedLoader(inner, store, **options)
    message = ""
    try:
        next(iter(watched))
    except UnequalBatchesError as error:
        message = str(error)
    seen = [watched.batch_size, watched.dataset is inner.dataset]
    # Both ranks in lockstep, on the store that they really share.
    shared = torch.distributed.PrefixStore("test_alone", torch.distributed.distributed_c10d._get_default_store())
    watched = WatchedLoader(inner, shared, **{**options, "timeout": timedelta(seconds=20)})
    keys = []
    for _ in itertools.islice(watched, 3):
        torch.distributed.barrier()
        keys.append([shared.check([f"1/{n}"]) for n in range(3)])
        torch.distributed.barrier()
    return message, len(keys), [seen, keys]


def test_a_rank_that_iterates_alone_is_told_so(ranks):
    for message, _, (seen, keys) in ranks(2).run(alone):
        assert "Only 1 of 2 ranks have asked for batch 0 of the val loader" in message
        assert seen == [2, True]
        assert keys == [[True, False, False], [False, True, False], [False, False, True]]


def test_persistent_workers_that_lightning_has_ended_are_started_again():
    loader = DataLoader(Stream(0, 4), batch_size=2, num_workers=1, persistent_workers=True)
    first = len(list(loader))
    watched = WatchedLoader(loader, None, prefix="train", remedy="", timeout=timedelta(seconds=1))
    CombinedLoader([watched]).reset()  # as at the end of a fit
    assert loader._iterator is None
    assert len(list(loader)) == first > 0


class WithState(Foreign):
    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def test_a_loaders_state_is_found_by_every_python():
    # typing.Protocol looks like this from 3.12 on.
    assert inspect.getattr_static(watched_class(Foreign(0, 2)), "state_dict", None) is None
    inner = WithState(0, 2)
    watched = watched_class(inner)(inner, None, prefix="train", remedy="", timeout=timedelta(seconds=1))
    assert all(inspect.getattr_static(watched, name, None) for name in ("state_dict", "load_state_dict"))
    watched.load_state_dict(watched.state_dict())
    assert inner.loaded == {"at": 3}
