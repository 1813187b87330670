# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation gives a plain Trainer's numbers: one division, and steps where Lightning counts them."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from tests.distributed.reference import BATCHES, Watched, compared, run, weights
from tests.distributed.stock import StockOnCPU
from tests.fits import QUIET, Pairs, optimizer_of

SMALL = {"stage": 3, "sub_group_size": 100}
OFFLOADED = {**SMALL, "offload_optimizer": {"device": "cpu"}}


def against_plain(accumulate: int, clip: float | None, zero: dict[str, Any] = SMALL, schedule: Any = None) -> Any:
    trainers = []
    for strategy in (Zero3FastStrategy({"zero_optimization": zero}), "auto"):
        callbacks = [GradientAccumulationScheduler(dict(schedule))] if schedule else []
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "callbacks": callbacks}
        trainers.append(run(strategy, Watched(), epochs=3 if schedule else 2, **options))
    return {**compared(*trainers), "type": type(optimizer_of(trainers[0])).__name__}


def assert_equal(seen: dict[str, Any]) -> None:
    assert seen["worst"] < 1e-6
    for name in ("steps", "rates", "before_step"):
        assert seen[name][0] == seen[name][1], name
    assert seen["norms"][0] == pytest.approx(seen["norms"][1], rel=1e-6)
    assert seen["engine"] == seen["steps"][0][-1]


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fit_equals_a_plain_trainers(ranks, world_size, accumulate, clip):
    for seen in ranks(world_size).run(against_plain, accumulate, clip):
        assert seen["type"] == "FastStage3Optimizer"
        assert_equal(seen)
        assert seen["steps"][0][-1] == 2 * -(-BATCHES // accumulate)
        assert clip is None or min(seen["norms"][0]) > clip


def test_an_offloaded_optimizers_fit_equals_a_plain_trainers(ranks):
    for seen in ranks(2).run(against_plain, 2, 0.05, OFFLOADED):
        assert_equal(seen)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_schedule_of_accumulation_equals_a_plain_trainers(ranks, world_size):
    """Lightning's callback refuses every DeepSpeed strategy; here the engine isn't asked for N."""
    for seen in ranks(world_size).run(against_plain, 1, 0.05, SMALL, {0: 3, 1: 1, 2: 2}):
        assert_equal(seen)
        assert seen["steps"][0] == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10]


def schedule_is_refused() -> list[str]:
    seen = []
    for strategy, accumulate in ((Zero3FastStrategy(stock_semantics=True), 1), (Zero3FastStrategy(), 2)):
        schedule = GradientAccumulationScheduler({0: 2})
        with pytest.raises((RuntimeError, ValueError)) as caught:
            run(strategy, Watched(), callbacks=[schedule], accumulate_grad_batches=accumulate)
        assert "on_train_start" not in vars(schedule)  # the callback is as it was
        seen.append(str(caught.value))
    return seen


def test_stock_semantics_refuse_a_schedule_and_so_does_a_second_n(ranks):
    stock, second = ranks(1).run(schedule_is_refused)[0]
    assert "does not support `accumulate_grad_batches` changing" in stock
    assert "Either remove `accumulate_grad_batches` from the Trainer" in second


def stock_divides_twice() -> list[float]:
    """The same two micro-batches: what stock's first update is of a plain Trainer's."""
    initial = [p.detach().clone() for p in Watched().parameters()]
    moved = []
    for strategy in ("auto", StockOnCPU(stage=3), Zero3FastStrategy(stock_semantics=True), Zero3FastStrategy()):
        trainer = pl.Trainer(
            strategy=strategy, devices=1, max_steps=1, accumulate_grad_batches=2, gradient_clip_val=None, **QUIET
        )
        trainer.fit(Watched(), DataLoader(Pairs(length=4), batch_size=2))
        moved.append(float((weights(trainer)[0] - initial[0]).abs().sum()))
    return [m / moved[0] for m in moved]


def test_stock_moves_half_as_far_and_stock_semantics_keep_that(ranks):
    plain, stock, semantics, ours = ranks(1).run(stock_divides_twice)[0]
    assert plain == 1
    assert ours == pytest.approx(1, rel=1e-6)
    assert stock == semantics
    if stock == pytest.approx(1, rel=1e-6):
        pytest.skip("Lightning or DeepSpeed divides once by itself")
    assert stock == pytest.approx(0.5, rel=1e-2)
