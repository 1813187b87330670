# SPDX-License-Identifier: Apache-2.0
"""Fits that write down all that happens, to hold a resumed one against the uninterrupted one."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from lightning_zero3 import Zero3FastStrategy
from tests.fits import QUIET, assert_equal_bits, optimizer_of, tensors_of

SAMPLES_PER_RANK = 12
BATCH_SIZE = 3
SEED = 5


def world_and_rank() -> tuple[int, int]:
    """Of the process group, or of SLURM's variables before there is one."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])


def drawn() -> float:
    """A number that all three generators of this process have a part in."""
    return float(torch.rand(())) + float(np.random.rand()) + random.random()


class Numbered(Dataset):
    """Fixed random regression data with each sample's index, perhaps augmented."""

    def __init__(self, length: int, augmented: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 13, generator=generator)
        self.y = torch.randn(length, 7, generator=generator)
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index] + (0.1 * drawn() if self.augmented else 0.0), self.y[index], index


class Stream(IterableDataset):
    """Without a length; it knows how far it is."""

    def __init__(self, length: int) -> None:
        self.data = Numbered(length)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.given = self.given, 0
        for index in range(first, len(self.data)):
            self.given = index + 1
            yield self.data[index]
        self.given = 0


class StreamLoader(DataLoader):
    """A stream with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"given": self.dataset.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.given = state["given"]


class Events(Logger):
    """A logger that appends to a list."""

    name = "events"
    version = 0

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.events.append(["log", step, {name: float(value) for name, value in metrics.items()}])

    def log_hyperparams(self, *_: Any) -> None:
        pass


SCHEDULERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "per step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 2, 0.7), "interval": "step"},
    "every other step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.7), "interval": "step", "frequency": 2},
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 1e-2, total_steps=30), "interval": "step"},
    "per epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.7), "interval": "epoch"},
    "plateau": lambda o: {"scheduler": _plateau(o), "interval": "epoch", "monitor": "validated"},
    "plateau of training": lambda o: {"scheduler": _plateau(o), "interval": "epoch", "monitor": "loss"},
    "plateau per step": lambda o: {"scheduler": _plateau(o), "interval": "step", "monitor": "loss"},
}


def _plateau(optimizer: Any) -> Any:
    # A loss that doesn't rise is a plateau: the rate falls nearly each time it is asked.
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, mode="max")


class Traced(pl.LightningModule):
    """Dropout, noise of the host's generators in training and validation, and a list of all that happens."""

    def __init__(self, scheduler: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(13, 31), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(31, 7)
        )
        self.noise = MeanMetric()
        self.scheduler = scheduler
        self.events: list[Any] = []

    def on_fit_start(self) -> None:
        # Ranks draw different numbers. Not before the fit: Lightning gives all ranks the seed as it begins.
        if self.trainer.ckpt_path is None:
            torch.manual_seed(100 + world_and_rank()[1])

    def forward(self, batch: Any) -> tuple[torch.Tensor, float]:
        x, y, _ = batch
        noise = drawn()
        return ((self.net(x + 0.1 * noise).float() - y) ** 2).mean(), noise

    def note(self, what: str, *details: Any) -> None:
        self.events.append([what, self.trainer.current_epoch, self.trainer.global_step, *details])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, noise = self(batch)
        self.noise(noise)
        rate = self.optimizers().param_groups[0]["lr"]
        self.note("train", batch_idx, batch[2].tolist(), loss.item(), noise, rate)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("noise", self.noise, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, noise = self(batch)
        self.note("validate", batch_idx, batch[2].tolist(), loss.item(), noise)
        self.log("validated", loss)

    def on_train_epoch_start(self) -> None:
        # Where the loader has a state of its own, hooks that draw are warned of.
        has_state = hasattr(self.trainer.train_dataloader, "load_state_dict")
        self.note("epoch starts", 0.0 if has_state else drawn())

    def on_train_epoch_end(self) -> None:
        self.note("epoch ends")

    def on_validation_end(self) -> None:
        self.note("validated")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [SCHEDULERS[self.scheduler](optimizer)] if self.scheduler else []


class SaveEverywhere(pl.Callback):
    """After each batch, validation and epoch, and how much had happened by then."""

    def __init__(self, folder: str, events: list[Any]) -> None:
        self.folder, self.events = folder, events
        self.saved: dict[str, int] = {}

    def _save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(f"{self.folder}/{name}")
        # A run that has all its steps is over, and isn't taken up.
        if trainer.global_step != trainer.max_steps:
            self.saved[name] = len(self.events)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, f"batch {trainer.fit_loop.total_batch_idx}")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, f"validation {trainer.fit_loop.total_batch_idx}")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, f"epoch {trainer.current_epoch}")


# What the run that saves still does itself, and a resume doesn't repeat.
ALREADY_DONE = {"batch": ("log",), "validation": ("validated", "log"), "epoch": ("epoch ends", "log")}


def loader(kind: str) -> DataLoader:
    """A training loader.

    Args:
        kind: "plain", "augmented", "stream", or "workers" (in a process of its own: a test's ranks start none).
    """
    length = SAMPLES_PER_RANK * world_and_rank()[0]
    if kind == "stream":
        return StreamLoader(Stream(SAMPLES_PER_RANK), batch_size=BATCH_SIZE)
    data = Numbered(length, augmented=kind == "augmented")
    return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=2 if kind == "workers" else 0)


def fitted(
    folder: str | None,
    ckpt_path: str | None,
    *,
    data: str = "plain",
    scheduler: str | None = None,
    validate: bool = True,
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> tuple[Any, Traced, SaveEverywhere]:
    """A fit of two epochs of four batches on this rank, saving everywhere if there is a folder."""
    world, _ = world_and_rank()
    pl.seed_everything(SEED, verbose=False)
    module = Traced(scheduler)
    saving = SaveEverywhere(folder or "", module.events)
    callbacks = trainer_options.pop("callbacks", list)()
    trainer = pl.Trainer(
        **{
            **QUIET,
            "strategy": Zero3FastStrategy(**(options or {})),
            "devices": world,
            "max_epochs": 2,
            "logger": Events(module.events),
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "callbacks": [*callbacks, *([saving] if folder else [])],
            **trainer_options,
        }
    )
    loaders = [loader(data)]
    if validate:
        loaders.append(DataLoader(Numbered(2 * BATCH_SIZE * world), BATCH_SIZE))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer, module, saving


def assert_resumes_everywhere(folder: str, arguments: dict[str, Any], only: tuple[str, ...] | None = None) -> int:
    """Resume from each checkpoint of a fit, and compare all that happens, and weights, masters and moments at the end.

    Args:
        folder: For checkpoints.
        arguments: Of :func:`fitted`.
        only: Names of checkpoints; None for all.

    Returns:
        How many were resumed from.
    """
    whole, module, saving = fitted(folder, None, **arguments)
    tensors, events = tensors_of(optimizer_of(whole)), list(module.events)
    names = [name for name in saving.saved if only is None or name in only]
    for name in names:
        resumed, again, _ = fitted(None, f"{folder}/{name}", **arguments)
        done = ALREADY_DONE[name.split()[0]]
        expected = list(itertools.dropwhile(lambda event, done=done: event[0] in done, events[saving.saved[name] :]))
        different = [pair for pair in itertools.zip_longest(again.events, expected) if pair[0] != pair[1]]
        assert not different, (name, different[0])
        assert (resumed.current_epoch, resumed.global_step) == (whole.current_epoch, whole.global_step), name
        assert_equal_bits(tensors_of(optimizer_of(resumed)), tensors)
    return len(names)


def checkpoint_of_rank(path: Path) -> dict[str, Any]:
    """What this rank's file of a checkpoint holds beside weights."""
    rank = torch.distributed.get_rank()
    file = path / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    states: dict[str, Any] = torch.load(file, weights_only=False)
    return states
