# SPDX-License-Identifier: Apache-2.0
"""A step that isn't taken is no step: ``global_step`` and schedulers stay, the user is told, a metric counts."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.stepping.skipped_steps import SKIPPED_IN_A_ROW_AT_MOST, EndlessSkippingError
from tests.distributed.reference import Watched, is_sharded, run
from tests.distributed.stock import StockOnCPU
from tests.distributed.test_accumulation import OFFLOADED, SMALL
from tests.fits import assert_equal_bits, optimizer_of, tensors_of

BATCHES = 6


class Poisoned(Watched):
    """Losses of some batches, counted over epochs, are no number on one rank."""

    def __init__(self, bad: tuple[int, ...] = (), automatic: bool = True, value: float = float("nan")) -> None:
        super().__init__()
        self.bad, self.value = bad, value
        self.automatic_optimization = automatic
        self.seen = 0
        self.scheduled: list[int] = []
        self.clipped: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.seen in self.bad and self.trainer.global_rank == 0:
            loss = loss * self.value
        self.seen += 1
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            if not getattr(self.trainer.strategy, "last_step_was_skipped", False):
                self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9), "interval": "step"}
        ]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scheduled.append(self.seen)
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(self.trainer.global_step)
        self.rates.append(self.lr_schedulers().get_last_lr()[0])
        if is_sharded(self):
            self.norms.append(float(self.trainer.strategy.model.get_global_grad_norm() or 0))


class Logged(pl.loggers.CSVLogger):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__(".", version="unused")
        self.skipped: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "optim/skipped_steps" in metrics:
            self.skipped.append((step, metrics["optim/skipped_steps"]))

    def save(self) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


def some_skipped(
    bad: tuple[int, ...], accumulate: int, automatic: bool, zero: dict[str, Any], value: float = float("nan")
) -> dict[str, Any]:
    module = Poisoned(bad, automatic, value)
    strategy = Zero3FastStrategy({"zero_optimization": zero})
    logger = Logged()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer = run(
            strategy,
            module,
            batches=BATCHES,
            accumulate_grad_batches=accumulate,
            callbacks=[Zero3Monitor()],
            logger=logger,
            log_every_n_steps=1,
        )
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    return {
        "steps": module.steps,
        "rates": [round(rate / 1e-2, 9) for rate in module.rates],
        "scheduled": module.scheduled,
        "hooks": module.before_step,
        "warned": [str(w.message) for w in caught if "was skipped" in str(w.message)],
        "logged": [count for _, count in logger.skipped],
        "engine": (strategy_engine := trainer.strategy.model).global_steps - strategy_engine.skipped_steps,
        "skipped": strategy_engine.skipped_steps,
        "ready": (progress.total.ready, progress.current.ready - progress.current.completed),
        "finite": all(bool(torch.isfinite(w).all()) for w in tensors_of(optimizer_of(trainer))["weights"]),
        "own methods": [
            name
            for owner in (trainer.fit_loop.epoch_loop, progress)
            for name in ("increment_completed", "update_lr_schedulers")
            if name in vars(owner)
        ],
    }


@pytest.mark.parametrize("zero", [SMALL, OFFLOADED], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_skipped_steps_do_not_count(ranks, world_size, zero):
    # Twelve batches; the first and two in a row are bad, on rank 0 alone.
    for rank, seen in enumerate(ranks(world_size).run(some_skipped, (0, 3, 4), 1, True, zero)):
        assert seen["steps"] == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9]
        assert seen["rates"] == pytest.approx([0.9**step for step in seen["steps"]], rel=1e-6)
        assert len(seen["scheduled"]) == 9
        assert seen["hooks"] == 12  # before a step it isn't known whether it will be taken
        assert (seen["engine"], seen["skipped"]) == (9, 3)
        assert seen["ready"] == (9, 0)
        assert seen["finite"]
        assert seen["logged"] == [1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
        assert [w.split(" was skipped")[0] for w in seen["warned"]] == (
            [
                "Optimizer step 1 (epoch 0, batch 0)",
                "Optimizer step 3 (epoch 0, batch 3)",
                "Optimizer step 3 (epoch 0, batch 4)",
            ]
            if rank == 0
            else []
        )
        assert seen["own methods"] == []


def test_one_bad_micro_batch_skips_its_window(ranks):
    for seen in ranks(2).run(some_skipped, (3, 11), 2, True, SMALL, float("inf")):
        assert seen["steps"] == [0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4]
        assert (seen["engine"], seen["skipped"]) == (4, 2)
        assert seen["finite"]


def test_with_manual_optimization_the_module_can_ask(ranks):
    for seen in ranks(2).run(some_skipped, (0, 3, 4), 1, False, SMALL):
        assert seen["steps"] == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9]
        assert seen["rates"] == pytest.approx([0.9**step for step in seen["steps"]], rel=1e-6)
        assert (seen["engine"], seen["skipped"]) == (9, 3)


def by_max_steps() -> dict[str, Any]:
    """``max_steps`` counts updates; a plain run without the bad batches has the same bits."""
    bad = run(Zero3FastStrategy(), Poisoned((1, 2)), batches=BATCHES, max_steps=4, epochs=-1)
    good = run(Zero3FastStrategy(), Poisoned(), batches=BATCHES, max_steps=4, epochs=-1)
    return {"steps": bad.lightning_module.steps, "of good": good.lightning_module.steps}


def test_max_steps_counts_updates(ranks):
    seen = ranks(1).run(by_max_steps)[0]
    assert seen["steps"] == [1, 1, 1, 2, 3, 4]
    assert seen["of good"] == [1, 2, 3, 4]


def endless() -> tuple[str, int]:
    module = Poisoned(tuple(range(1000)))
    with pytest.raises(EndlessSkippingError) as caught:
        run(Zero3FastStrategy(), module, max_steps=3, epochs=-1)
    return str(caught.value), module.seen


def test_a_run_that_skips_every_step_ends(ranks):
    for message, batches in ranks(2).run(endless):
        assert batches == SKIPPED_IN_A_ROW_AT_MOST
        assert f"is number {SKIPPED_IN_A_ROW_AT_MOST} in a row that was skipped" in message
        assert "detect_anomaly=True" in message


def resumed(folder: str) -> dict[str, Any]:
    """Saved at the skipped batch."""

    class Saving(Poisoned):
        def on_train_batch_end(self, *_: Any) -> None:
            super().on_train_batch_end()
            if self.seen == 4:
                self.trainer.save_checkpoint(f"{folder}/skipped")

    class Later(Poisoned):
        def __init__(self) -> None:
            super().__init__((5,))
            self.seen = 4

    options = {"batches": 4, "epochs": 2}
    whole = run(Zero3FastStrategy(), Saving((3, 5)), **options)
    rest = run(Zero3FastStrategy(), Later(), ckpt_path=f"{folder}/skipped", **options)
    assert_equal_bits(tensors_of(optimizer_of(whole)), tensors_of(optimizer_of(rest)))
    engines = [t.strategy.model for t in (whole, rest)]
    return {
        "steps": (whole.lightning_module.steps, rest.lightning_module.steps),
        "rates": (whole.lightning_module.rates, rest.lightning_module.rates),
        "skipped": [engine.skipped_steps for engine in engines],
    }


def test_skipped_steps_survive_a_resume(ranks, tmp_path):
    for seen in ranks(2).run(resumed, str(tmp_path)):
        assert seen["steps"][0] == [1, 2, 3, 3, 4, 4, 5, 6]
        assert seen["steps"][1] == seen["steps"][0][4:]
        assert seen["rates"][1] == seen["rates"][0][4:]
        assert seen["skipped"] == [2, 2]


def in_stock() -> list[list[int]]:
    strategies = (StockOnCPU(stage=3), Zero3FastStrategy(stock_semantics=True))
    return [run(strategy, Poisoned((1,)), batches=3, epochs=1).lightning_module.steps for strategy in strategies]


def test_stock_counts_skipped_steps_and_stock_semantics_keep_that(ranks):
    assert ranks(1).run(in_stock)[0] == [[1, 2, 3], [1, 2, 3]]
