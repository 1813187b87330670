# SPDX-License-Identifier: Apache-2.0
"""What each rank sees under tensor parallelism: peers the same samples, data-parallel ranks others; or an error."""

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_zero3 import PeerBatchesError, Zero3FastStrategy
from lightning_zero3.topology import Topology
from tests.fits import Language
from tests.models import build, tiny

TRAIN, VAL = range(8), range(40, 48)


class Numbered(Dataset):
    """Token ids that begin with the sample's number, as a dict or a tuple, maybe of a length of the rank's own."""

    def __init__(self, numbers: range, form: str = "dict", length: int = 8) -> None:
        self.numbers, self.form, self.length = numbers, form, length

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(self.length) + self.numbers[index]
        labels = {"labels": ids, "name": f"sample {index}"}
        return (ids, (labels,)) if self.form == "tuple" else {"input_ids": ids, **labels}


class Stream(IterableDataset):
    """One shard of the samples."""

    def __init__(self, data: Dataset, shard: int, shards: int) -> None:
        self.data, self.shard, self.shards = data, shard, shards

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(self.shard, len(self.data), self.shards))


class Seen(Language):
    """Notes the numbers of the samples in each batch."""

    def __init__(self, train: Any, val: Any) -> None:
        super().__init__(build(tiny("mixtral")))
        self.loaders = {"train": train, "val": val}
        self.numbers: dict[str, list[list[int]]] = {"train": [], "val": []}

    def train_dataloader(self) -> Any:
        return self.loaders["train"](self.trainer)

    def val_dataloader(self) -> Any:
        return self.loaders["val"](self.trainer)

    def loss(self, batch: Any, stage: str) -> torch.Tensor:
        if isinstance(batch, list | tuple):
            batch = {"input_ids": batch[0], **batch[1][0]}
        self.numbers[stage].append(batch["input_ids"][:, 0].tolist())
        return self.some_odd_name(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, "val"), sync_dist=True)


def loader(kind: str, numbers: range, form: str = "dict") -> Any:
    """What makes a loader when a Trainer asks for it, on this rank."""
    rank, world, data = torch.distributed.get_rank(), torch.distributed.get_world_size(), Numbered(numbers, form)
    makers = {
        "lightning's sampler": lambda _: DataLoader(data, batch_size=2, shuffle=numbers is TRAIN),
        "right sampler": lambda trainer: DataLoader(
            data, batch_size=2, sampler=DistributedSampler(data, **trainer.distributed_sampler_kwargs)
        ),
        "right stream": lambda _: DataLoader(Stream(data, rank // 2, world // 2), batch_size=2),
        "sampler by rank": lambda _: DataLoader(
            data, batch_size=2, sampler=DistributedSampler(data, num_replicas=world, rank=rank)
        ),
        "stream by rank": lambda _: DataLoader(Stream(data, rank, world), batch_size=2),
        # Only ranks 2 and 3 differ.
        "half wrong": lambda _: DataLoader(Stream(data, int(rank == 2), 2), batch_size=2),
        "one shard for all": lambda _: DataLoader(Stream(data, 0, world // 2), batch_size=2),
        "own lengths": lambda _: DataLoader(Numbered(numbers, form, 8 + rank), batch_size=2),
    }
    return makers[kind]


def fit(module: Seen, **options: Any) -> Seen:
    trainer = pl.Trainer(
        strategy=Zero3FastStrategy(tensor_parallel_size=2, **options),
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module


def seen(kind: str, form: str, experts: int | None) -> dict[str, list[list[int]]]:
    return fit(Seen(loader(kind, TRAIN, form), loader(kind, VAL, form)), expert_parallel_size=experts).numbers


@pytest.mark.parametrize(
    ("world_size", "experts", "kind", "form"),
    [
        (2, None, "lightning's sampler", "dict"),
        (2, None, "right sampler", "tuple"),
        (2, None, "right stream", "dict"),
        (4, 2, "lightning's sampler", "tuple"),
        (4, 2, "right sampler", "dict"),
        (4, 2, "right stream", "tuple"),
    ],
)
def test_peers_see_the_same_samples_and_data_parallel_ranks_different_ones(ranks, world_size, experts, kind, form):
    layout = Topology(world_size, experts or 1, 2)
    by_rank = ranks(world_size).run(seen, kind, form, experts)
    for rank, numbers in enumerate(by_rank):
        assert numbers == by_rank[layout.tensor_parallel_ranks(rank)[0]]
    for stage, expected in (("train", TRAIN), ("val", VAL)):
        lanes = [by_rank[rank][stage] for rank in layout.data_parallel_ranks(0)]
        batches = len(expected) // 2 // len(lanes)
        for epoch in range(2):
            of_epoch = [lane[epoch * batches : (epoch + 1) * batches] for lane in lanes]
            assert sorted(number for lane in of_epoch for batch in lane for number in batch) == list(expected)
    if kind == "lightning's sampler":
        assert by_rank[0]["train"][:2] != by_rank[0]["train"][-2:], "shuffled anew in each epoch"


def refused(train: str, val: str, options: dict[str, Any]) -> tuple[str, dict[str, list[list[int]]]]:
    module = Seen(loader(train, TRAIN, "tuple"), loader(val, VAL))
    with pytest.raises(PeerBatchesError) as caught:
        fit(module, **options)
    return str(caught.value), module.numbers


@pytest.mark.parametrize(
    ("train", "val", "options", "message"),
    [
        ("sampler by rank", "right sampler", {}, "train batch of loader 0 .*ranks 0, 1 have different values in int64"),
        ("stream by rank", "right stream", {}, "train batch of loader 0 .*ranks 0, 1 have different values in int64"),
        ("own lengths", "right sampler", {}, r"int64 \(2, 8\), int64 \(2, 8\) \(rank 0\) \| int64 \(2, 9\), .*rank 1"),
        ("right sampler", "stream by rank", {}, "val batch of loader 0 .*ranks 0, 1 have different values"),
        # Stock's sampler.
        ("lightning's sampler", "right stream", {"stock_semantics": True}, "train batch .* without stock_semantics"),
    ],
)
def test_peers_with_different_batches_are_told_before_anything_is_computed(ranks, train, val, options, message):
    for text, numbers in ranks(2).run(refused, train, val, options):
        assert re.search(message, text), text
        assert "num_replicas=1, rank=trainer.global_rank // 2" in text
        # The step that would have used the batch hasn't run.
        assert numbers["val" if "val batch" in message else "train"] == []


def test_one_group_of_peers_with_different_batches_stops_all_ranks(ranks):
    for text, numbers in ranks(4).run(refused, "half wrong", "right stream", {}):
        assert "loader 0 isn't the same on tensor-parallel peers, which share each layer: ranks 2, 3 have" in text
        assert "num_replicas=2, rank=trainer.global_rank // 2" in text
        assert numbers == {"train": [], "val": []}


def warned(kind: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Seen(loader(kind, TRAIN), loader("right stream", VAL)))
    return [str(warning.message) for warning in caught if "data-parallel ranks have the same" in str(warning.message)]


def test_data_parallel_ranks_with_the_same_batch_are_a_warning(ranks):
    assert "All 2 data-parallel ranks" in ranks(4).run(warned, "one shard for all")[0][0]
    assert ranks(4).run(warned, "right stream") == [[]] * 4


def rank_of_workers(kind: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_SEED_WORKERS", "1")
        module = fit(Seen(loader(kind, TRAIN), loader(kind, VAL)))
        used = module.trainer.train_dataloader
        # On the loader that is watched, not on the one that watches.
        return getattr(used, "_loader", used).worker_init_fn.keywords["rank"]


@pytest.mark.parametrize("kind", ["lightning's sampler", "right stream"])
def test_workers_are_seeded_by_the_shard_that_they_read(ranks, kind):
    assert ranks(4).run(rank_of_workers, kind) == [0, 0, 1, 1]
