# SPDX-License-Identifier: Apache-2.0
"""A run resumed at any batch, also between the micro-batches of one step, has the uninterrupted run's bits."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero3 import Zero3FastStrategy
from tests.distributed.reference import BATCHES, Watched
from tests.distributed.test_accumulation import OFFLOADED, SMALL
from tests.distributed.test_manual_steps import Manual
from tests.fits import QUIET, Pairs, assert_equal_bits, optimizer_of, tensors_of

EPOCHS = 2


class Resumable(DataLoader):
    """A loader that Lightning can save and restore, as torchdata's ``StatefulDataLoader``."""

    first = done = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.done = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = self.done = state["done"]


class AdamAutomatic(Watched):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AdamManual(AdamAutomatic, Manual):
    pass


class SaveEachBatch(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.fit_loop.total_batch_idx + 1}")


def run(
    folder: str | None,
    ckpt_path: str | None,
    accumulate: int,
    automatic: bool,
    zero: dict[str, Any] = SMALL,
    schedule: dict[int, int] | None = None,
    strategy: Any = None,
    **options: Any,
) -> Any:
    module = (
        AdamAutomatic() if automatic else AdamManual({1: "one batch", 2: "two batches", 3: "three batches"}[accumulate])
    )
    callbacks: list[Any] = [SaveEachBatch(folder)] if folder else []
    if schedule:
        callbacks.append(GradientAccumulationScheduler(dict(schedule)))
    world = torch.distributed.get_world_size()
    trainer = pl.Trainer(
        **{
            "strategy": strategy or Zero3FastStrategy({"zero_optimization": zero}),
            "devices": world,
            "max_epochs": EPOCHS,
            "accumulate_grad_batches": accumulate if automatic and not schedule else 1,
            "use_distributed_sampler": False,
            "callbacks": callbacks,
            **QUIET,
            **options,
        }
    )
    data = Pairs(length=2 * world * BATCHES)
    loader = Resumable(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=1))
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def state_of(trainer: Any) -> dict[str, Any]:
    engine, loop = trainer.strategy.model, trainer.fit_loop.epoch_loop
    return {
        "global_step": trainer.global_step,
        "engine": (engine.global_steps, engine.micro_steps, engine.skipped_steps),
        "scheduler": dict(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        "optimizer steps": (loop.automatic_optimization.optim_progress.optimizer.step.total.completed),
        "epoch": trainer.current_epoch,
    }


def at_every_batch(folder: str, accumulate: int, automatic: bool, zero: dict[str, Any], schedule: Any) -> None:
    whole = run(folder, None, accumulate, automatic, zero, schedule)
    expected, tensors = state_of(whole), tensors_of(optimizer_of(whole))
    losses, steps = whole.lightning_module.losses, whole.lightning_module.steps
    assert len(losses) == EPOCHS * BATCHES
    for batch in range(1, EPOCHS * BATCHES):
        resumed = run(None, f"{folder}/{batch}", accumulate, automatic, zero, schedule)
        assert resumed.lightning_module.losses == losses[batch:], batch
        assert resumed.lightning_module.steps == steps[batch:], batch
        assert state_of(resumed) == expected, batch
        assert_equal_bits(tensors_of(optimizer_of(resumed)), tensors)


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 2), (2, 1), (2, 3)])
def test_a_resume_at_any_batch_equals_the_uninterrupted_run(ranks, world_size, accumulate, automatic, tmp_path):
    ranks(world_size).run(at_every_batch, str(tmp_path), accumulate, automatic, SMALL, None)


def test_an_offloaded_optimizer_resumes_at_any_batch(ranks, tmp_path):
    ranks(2).run(at_every_batch, str(tmp_path), 3, True, OFFLOADED, None)


def test_a_schedule_of_accumulation_resumes_at_any_batch(ranks, tmp_path):
    """Lightning sets N when an epoch begins, which a resume within one doesn't do."""
    ranks(1).run(at_every_batch, str(tmp_path), 1, True, SMALL, {0: 3, 1: 2})


def by_model_checkpoint(folder: str) -> list[dict[str, Any]]:
    """Lightning's own callback, which saves after steps."""
    callback = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    whole = run(None, None, 2, True, callbacks=[callback], enable_checkpointing=True)
    seen = []
    for name in ("step=2.ckpt", "step=4.ckpt"):
        resumed = run(None, f"{folder}/{name}", 2, True)
        assert_equal_bits(tensors_of(optimizer_of(resumed)), tensors_of(optimizer_of(whole)))
        assert state_of(resumed) == state_of(whole), name
        shard = torch.load(f"{folder}/{name}/checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
        seen.append({name: shard[name] for name in ("global_step", "global_steps", "lightning_zero3_micro_steps")})
    return seen


def test_checkpoints_of_lightnings_callback_resume_and_agree_on_the_step(ranks, tmp_path):
    for two, four in ranks(2).run(by_model_checkpoint, str(tmp_path)):
        assert two["global_step"] == two["global_steps"] == 2
        assert two["lightning_zero3_micro_steps"] == {"micro_steps": 4, "partial_gradients": False}
        assert four["global_step"] == four["global_steps"] == 4
        assert four["lightning_zero3_micro_steps"] == {"micro_steps": 7, "partial_gradients": False}


def in_the_middle(folder: str) -> dict[str, Any]:
    """After one of three micro-batches: loaded where its gradients don't fit, by stock, and in a plain Trainer."""
    seen: dict[str, Any] = {}
    whole = run(folder, None, 3, True)
    path = f"{folder}/1/checkpoint/{optim_states(folder)}"
    states = torch.load(path, weights_only=False)
    partial = states["optimizer_state_dict"]["lightning_zero3_partial_gradients"]
    partial["gradients"] = partial["gradients"][1:]
    torch.save(states, path)
    Path(f"{folder}/1/manifest.json").unlink()  # which knows better
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run(None, f"{folder}/1", 3, True)
    seen["warned"] = [str(w.message) for w in caught if "between the micro-batches" in str(w.message)]
    seen["steps"] = resumed.lightning_module.steps == whole.lightning_module.steps[1:]
    without = tensors_of(optimizer_of(resumed))["weights"]
    seen["differs"] = not all(
        torch.equal(a, b) for a, b in zip(without, tensors_of(optimizer_of(whole))["weights"], strict=True)
    )
    plain = run(f"{folder}/plain", None, 3, True, strategy="auto")
    resumed = run(None, f"{folder}/plain/1", 3, True, strategy="auto")
    assert resumed.lightning_module.steps == plain.lightning_module.steps[1:]
    states = [list(t.lightning_module.parameters()) for t in (plain, resumed)]
    seen["plain differs"] = not all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    return seen


def optim_states(folder: str) -> str:
    return next(path.name for path in Path(f"{folder}/1/checkpoint").glob("*optim_states.pt"))


def test_gradients_that_do_not_fit_are_dropped_with_a_warning(ranks, tmp_path):
    """As a plain Trainer drops them, which it does without one."""
    seen = ranks(1).run(in_the_middle, str(tmp_path))[0]
    assert len(seen["warned"]) == 1
    assert "They are dropped" in seen["warned"][0]
    assert seen["steps"]
    assert seen["differs"]
    assert seen["plain differs"]
