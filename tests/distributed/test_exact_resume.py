# SPDX-License-Identifier: Apache-2.0
"""A resumed run is the uninterrupted one, bit for bit, wherever in a fit it was saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler

from tests.fits import assert_equal_bits, optimizer_of, tensors_of
from tests.resumes import (
    BATCH_SIZE,
    SCHEDULERS,
    Numbered,
    assert_resumes_everywhere,
    checkpoint_of_rank,
    fitted,
)

# In the middle and at the end of an epoch, before, between and after validations.
FEW = ("batch 1", "batch 3", "validation 3", "epoch 0")
VALIDATES_TWICE = {"val_check_interval": 2}


def everywhere(folder: str, arguments: dict[str, Any], only: Any) -> int:
    if "early" in arguments:
        arguments = {**arguments, "callbacks": lambda: [EarlyStopping("validated", patience=1, mode="max")]}
        arguments.pop("early")
    return assert_resumes_everywhere(folder, arguments, only)


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [(2, {"scheduler": "plateau", "accumulate_grad_batches": 3, **VALIDATES_TWICE})],
)
def test_a_resume_does_what_the_uninterrupted_run_did(ranks, tmp_path, world_size, arguments):
    assert set(ranks(world_size).run(everywhere, str(tmp_path), arguments, FEW)) == {len(FEW)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        *({"scheduler": name, **VALIDATES_TWICE} for name in SCHEDULERS),
        {"data": "augmented"},
        {"data": "stream", "validate": False},
        {"data": "stream", "max_epochs": -1, "max_steps": 9, "validate": False},
        {"max_epochs": -1, "max_steps": 9, "scheduler": "plateau"},
        {"check_val_every_n_epoch": None, "val_check_interval": 3},
        {"max_epochs": 4, "early": True},
        {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
        {"precision": "bf16-true", "scheduler": "one cycle"},
        {"options": {"offload_optimizer": True}, "accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_a_resume_anywhere_does_what_the_uninterrupted_run_did(ranks, tmp_path, world_size, arguments):
    assert min(ranks(world_size).run(everywhere, str(tmp_path), arguments, None)) >= 10


# A fit that ends within an epoch.


def more_steps(folder: str, stops: str) -> dict[str, Any]:
    """Stopped after three steps, saved by Lightning's callback at the epoch's "end" and after fit, and continued."""

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    whole, module, _ = fitted(None, None, max_epochs=-1, max_steps=10, validate=False)
    tensors = tensors_of(optimizer_of(whole))
    steps = [event for event in module.events if event[0] == "train"]
    callback = ModelCheckpoint(folder, save_on_train_epoch_end=True, filename="by callback", save_top_k=-1)
    limits = {"max_steps": 3} if stops == "max_steps" else {"max_steps": 10}
    callbacks = [callback] if stops == "max_steps" else [callback, Stop()]
    short, begun, _ = fitted(
        None, None, max_epochs=-1, validate=False, enable_checkpointing=True, callbacks=lambda: callbacks, **limits
    )
    short.save_checkpoint(f"{folder}/after fit")
    first = [event for event in begun.events if event[0] == "train"]
    for name in ("by callback.ckpt", "after fit"):
        more, continued, _ = fitted(None, f"{folder}/{name}", max_epochs=-1, max_steps=10, validate=False)
        assert first + [event for event in continued.events if event[0] == "train"] == steps, name
        assert (more.current_epoch, more.global_step) == (whole.current_epoch, whole.global_step), name
        assert_equal_bits(tensors_of(optimizer_of(more)), tensors)
    return {"steps": len(first)}


@pytest.mark.parametrize(
    ("world_size", "stops"),
    [
        (1, "max_steps"),
        pytest.param(2, "max_steps", marks=pytest.mark.slow),
        pytest.param(2, "should_stop", marks=pytest.mark.slow),
    ],
)
def test_a_fit_that_ended_within_an_epoch_goes_on_there(ranks, tmp_path, world_size, stops):
    """Lightning counts the epoch as a whole one, and would go on within the next one's order."""
    assert ranks(world_size).run(more_steps, str(tmp_path), stops)[0] == {"steps": 3}


# What isn't exact says so.


class Unlike(DataLoader):
    """A loader whose order nobody knows."""

    def __init__(self, length: int) -> None:
        data = Numbered(length)
        super().__init__(data, BATCH_SIZE, sampler=RandomSampler(data))


def told(folder: str) -> dict[str, list[str]]:
    from tests import resumes

    fitted(folder, None, validate=False, max_epochs=1)
    rank_0 = checkpoint_of_rank(Path(folder) / "batch 1")["lightning_zero3_fit"]
    assert rank_0["place"] == "batch trained"
    seen: dict[str, list[str]] = {}

    def resumed(name: str, **arguments: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted(None, f"{folder}/batch 1", validate=False, max_epochs=1, **arguments)
        messages = [str(one.message) for one in caught]
        seen[name] = [message for message in messages if "This checkpoint" in message or "resum" in message]

    resumed("plain")
    own, resumes.loader = resumes.loader, lambda _: Unlike(resumes.SAMPLES_PER_RANK)
    try:
        resumed("other sampler", use_distributed_sampler=False)
    finally:
        resumes.loader = own
    resumes.SEED, seed = resumes.SEED + 1, resumes.SEED
    try:
        resumed("other seed")
    finally:
        resumes.SEED = seed
    return seen


def test_what_cannot_be_restored_is_said_once(ranks, tmp_path):
    seen = ranks(1).run(told, str(tmp_path))[0]
    assert seen["plain"] == []
    (message,) = seen["other sampler"]
    assert "after 2 batches of epoch 0, and the training loader (Unlike) can't go on there" in message
    assert "the order of RandomSampler isn't known" in message
    assert "StatefulDataLoader" in message
    (message,) = seen["other seed"]
    assert "seed_everything(5), this run has 6" in message


def states_of_ranks(folder: str) -> dict[str, Any]:
    fitted(folder, None, validate=False, max_epochs=1, scheduler="per step")
    state = checkpoint_of_rank(Path(folder) / "batch 1")["lightning_zero3_fit"]
    return {"rank": state["rank"], "torch": state["random"]["torch"]}


@pytest.mark.slow
def test_each_rank_has_its_own_random_states(ranks, tmp_path):
    first, second = ranks(2).run(states_of_ranks, str(tmp_path))
    assert (first["rank"], second["rank"]) == (0, 1)
    assert not torch.equal(first["torch"], second["torch"])
