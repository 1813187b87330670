# SPDX-License-Identifier: Apache-2.0
"""``Zero3Monitor`` in real fits: what it logs, over ranks, on which steps, and what it keeps out."""

import contextlib
import io
import time
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.config import SetupError
from lightning_zero3.flops import count_flops
from lightning_zero3.metrics import names, over_ranks
from lightning_zero3.metrics.summary import read_metrics
from lightning_zero3.substitution import substituted
from tests.fits import Language, Pairs, Regression, Sentences, fit
from tests.models import build_glm, tiny_glm

MICRO_STEP = {names.STEP_MICROSTEP, names.FWD_MICROSTEP, names.BWD_MICROSTEP, names.OPTIMIZER_STEP}
WHOLE_STEP = {names.FWD, names.BWD, names.BWD_INNER, names.BWD_ALLREDUCE, names.STEP_TOTAL, names.DATA_WAIT}
HOST = {names.HOST_RSS, names.HOST_RSS_PEAK}
OPTIMIZER = {names.LOSS_OF_STEP, names.LEARNING_RATE, names.GRAD_NORM, names.SUB_GROUPS, names.SKIPPED_STEPS}
SPREAD = {each.name for name in MICRO_STEP | WHOLE_STEP | HOST for each in names.spread_of(names.BY_NAME[name])}


class Slow(Regression):
    """Sleeps in forward: in training, and longer in validation."""

    def __init__(self, training: float, validation: float) -> None:
        super().__init__()
        self.sleep_training, self.sleep_validation = training, validation

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.sleep_training * (1 + torch.distributed.get_rank()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.sleep_validation)
        self.net(batch[0])

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Pairs(length=8), batch_size=2)


def logged(folder: str, training: float, validation: float, options: dict[str, Any]) -> dict[str, dict[int, float]]:
    logger = CSVLogger(folder, name="", version="run")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = fit(
            Slow(training, validation), Pairs(), "zero3_fast", logger=logger, callbacks=[Zero3Monitor()], **options
        )
    assert "time (ms)" not in printed.getvalue()
    assert trainer.strategy.model.wall_clock_breakdown()
    torch.distributed.barrier()
    return read_metrics(f"{folder}/run/metrics.csv") if trainer.is_global_zero else {}


def test_times_and_host_memory_are_logged_every_step_as_the_slowest_ranks(ranks, tmp_path):
    metrics = ranks(2).run(logged, str(tmp_path), 0.05, 0.0, {"limit_val_batches": 0})[0]
    assert set(metrics) == MICRO_STEP | WHOLE_STEP | HOST | OPTIMIZER | SPREAD
    for name in metrics:
        assert sorted(metrics[name]) == [0, 1, 2, 3, 4], name
    # Rank 1 sleeps twice as long as rank 0, in forward and nowhere else.
    for step in range(5):
        assert metrics[names.FWD_MICROSTEP][step] >= 100
        assert 50 <= metrics["ranks/fwd_microstep_min_ms"][step] <= metrics[names.FWD_MICROSTEP][step]
        assert metrics[names.STEP_TOTAL][step] >= metrics[names.FWD_MICROSTEP][step]
        assert 0 < metrics[names.STEP_MICROSTEP][step] < metrics[names.STEP_TOTAL][step]
        assert metrics[names.HOST_RSS_PEAK][step] >= metrics[names.HOST_RSS][step] > 0.05


def test_validation_is_no_part_of_a_training_step(ranks, tmp_path):
    options = {"val_check_interval": 2, "num_sanity_val_steps": 2, "limit_val_batches": 2}
    metrics = ranks(1).run(logged, str(tmp_path), 0.0, 1.0, options)[0]
    assert len(metrics[names.FWD_MICROSTEP]) == 5
    assert max(metrics[names.FWD_MICROSTEP].values()) < 1000
    assert max(metrics[names.STEP_TOTAL].values()) < 1000


def test_nothing_is_logged_between_logged_steps(ranks, tmp_path):
    metrics = ranks(1).run(logged, str(tmp_path), 0.0, 0.0, {"limit_val_batches": 0, "log_every_n_steps": 2})[0]
    assert sorted(metrics[names.STEP_MICROSTEP]) == [1, 3]


def test_accumulated_micro_steps_are_one_step(ranks, tmp_path):
    options = {"limit_val_batches": 0, "accumulate_grad_batches": 2, "max_steps": 3}
    metrics = ranks(1).run(logged, str(tmp_path), 0.02, 0.0, options)[0]
    assert sorted(metrics[names.STEP_MICROSTEP]) == [0, 1, 2]
    for step in range(3):
        # The whole step has both forwards, the micro-step's timer the last one's.
        assert metrics[names.STEP_TOTAL][step] >= metrics[names.FWD][step] >= 2 * 20
        assert metrics[names.FWD][step] - metrics[names.FWD_MICROSTEP][step] >= 20
        assert metrics[names.FWD_MICROSTEP][step] >= 20


def collectives(log_every: int) -> tuple[int, int]:
    gathers = []
    real = over_ranks.gather_once

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers.append(1)
        return real(*args, **kwargs)

    with substituted(over_ranks, "gather_once", counted):
        fit(
            Regression(),
            Pairs(),
            "zero3_fast",
            steps=6,
            log_every_n_steps=log_every,
            callbacks=[Zero3Monitor()],
            limit_val_batches=0,
        )
    return len(gathers), torch.distributed.get_world_size()


def test_one_gather_per_logged_step_and_none_on_others(ranks):
    assert ranks(2).run(collectives, 1) == [(6, 2), (6, 2)]
    assert ranks(2).run(collectives, 3) == [(2, 2), (2, 2)]


PEAK = 1e12


def tokens(options: dict[str, Any], parallel: dict[str, int]) -> dict[str, float]:
    config = tiny_glm(num_key_value_heads=2)
    trainer = fit(
        Language(build_glm(config, seed=1)),
        Sentences(config.vocab_size, sequence_length=16),
        Zero3FastStrategy(**parallel),
        steps=4,
        callbacks=[Zero3Monitor(peak_flops=PEAK)],
        **options,
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("options", "parallel", "batches"),
    [
        ({}, {}, 2),
        ({"accumulate_grad_batches": 3}, {}, 3 * 2),
        ({"log_every_n_steps": 2}, {}, 2),
        # Both ranks see the same batch.
        ({}, {"tensor_parallel_size": 2}, 1),
    ],
    ids=["plain", "accumulated", "every other step", "tensor parallel"],
)
def test_tokens_per_second_are_of_all_ranks_over_the_slowest_step(ranks, options, parallel, batches):
    for metrics in ranks(2).run(tokens, options, parallel):
        # Two samples of sixteen tokens in each batch.
        expected = batches * 2 * 16 / (metrics[names.STEP_TOTAL] / 1e3)
        assert metrics[names.TOKENS_PER_SECOND] == pytest.approx(expected, rel=1e-4)
        assert metrics["tokens/s"] == pytest.approx(expected, rel=1e-4)  # the progress bar's
        assert metrics[names.DEVICE_TOKENS_PER_SECOND] == pytest.approx(expected / 2, rel=1e-4)
        # Counted before layers are split; both devices' peaks.
        flops = batches * count_flops(build_glm(tiny_glm(num_key_value_heads=2))).training([16, 16])
        expected = flops / (metrics[names.STEP_TOTAL] / 1e3) / (2 * PEAK)
        assert metrics[names.MFU] == pytest.approx(expected, rel=1e-4)


class SlowPairs(Pairs):
    """50 ms a sample, and as much again for each rank before."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05 * (1 + torch.distributed.get_rank()))
        return super().__getitem__(index)


def waits(accumulate: int) -> float:
    trainer = fit(
        Regression(), SlowPairs(), "zero3_fast", steps=2, accumulate_grad_batches=accumulate, callbacks=[Zero3Monitor()]
    )
    return float(trainer.callback_metrics[names.DATA_WAIT])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_wait_for_data_is_of_all_micro_steps_and_nothing_else(ranks, accumulate):
    # Two samples of 50 ms a micro-step.
    waited = ranks(1).run(waits, accumulate)[0]
    # Training steps counted as waits would give 600 ms for 3.
    assert accumulate * 100 <= waited < accumulate * 100 + 250


def spread_of_waits() -> dict[str, float]:
    monitor = Zero3Monitor()
    fit(Regression(), SlowPairs(), "zero3_fast", steps=3, callbacks=[monitor])
    return dict(monitor.latest)


def test_the_slowest_rank_is_named_and_the_quickest_is_beside_it(ranks):
    for latest in ranks(2).run(spread_of_waits):
        assert latest["ranks/data_wait_max_rank"] == 1
        assert latest[names.DATA_WAIT] >= 200
        # Rank 0's: of its own samples, without what rank 1 waits for.
        assert 100 <= latest["ranks/data_wait_min_ms"] <= latest[names.DATA_WAIT] - 50


def test_validation_between_two_micro_steps_takes_nothing_from_their_step(ranks, tmp_path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    metrics = ranks(1).run(logged, str(tmp_path), 0.2, 0.5, options)[0]
    for step, total in metrics[names.STEP_TOTAL].items():
        # Two forwards of 200 ms; a validation of 500 ms in between doesn't count, and doesn't cut the first one off.
        assert 400 <= total < 890, step


def accumulated(folder: str, stock_semantics: bool) -> dict[str, dict[int, float]]:
    logger = CSVLogger(folder, name="", version="run")
    trainer = fit(
        Regression(),
        Pairs(length=8),
        Zero3FastStrategy(stock_semantics=stock_semantics),
        steps=6,
        accumulate_grad_batches=3,
        logger=logger,
        callbacks=[Zero3Monitor()],
    )
    assert trainer.global_step == 6
    return read_metrics(f"{folder}/run/metrics.csv")


def test_a_step_at_an_epochs_end_has_its_engine_times(ranks, tmp_path):
    # Four batches an epoch: a step after 3 and, at the epoch's end, after 1.
    metrics = ranks(1).run(accumulated, str(tmp_path), False)[0]
    assert sorted(metrics[names.STEP_TOTAL]) == sorted(metrics[names.STEP_MICROSTEP]) == [0, 1, 2, 3, 4, 5]
    assert min(metrics[names.STEP_MICROSTEP].values()) > 0.1


def test_a_step_that_the_engine_does_not_take_has_no_engine_times(ranks, tmp_path):
    # Stock: Lightning steps at the epoch's end as well, the engine counts on.
    metrics = ranks(1).run(accumulated, str(tmp_path), True)[0]
    assert sorted(metrics[names.STEP_TOTAL]) == [0, 1, 2, 3, 4, 5]
    assert 0 < len(metrics[names.STEP_MICROSTEP]) < 6
    # An engine step that updates nothing takes a few microseconds.
    assert min(metrics[names.STEP_MICROSTEP].values()) > 0.1


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


def manual() -> list[str]:
    trainer = fit(Manual(), Pairs(), "zero3_fast", callbacks=[Zero3Monitor()])
    assert len(trainer.lightning_module.losses) == 5
    return sorted(trainer.callback_metrics)


def test_manual_optimization_goes_on_without_the_engines_timers(ranks):
    seen = ranks(1).run(manual)[0]
    assert names.STEP_TOTAL in seen
    assert names.STEP_MICROSTEP not in seen


def printed_by(config: dict[str, Any]) -> bool:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fit(Regression(), Pairs(), Zero3FastStrategy(config), steps=2, callbacks=[Zero3Monitor()])
    return "time (ms)" in printed.getvalue()


def test_timer_lines_that_the_user_asked_for_stay(ranks):
    assert ranks(1).run(printed_by, {"wall_clock_breakdown": True}) == [True]
    assert ranks(1).run(printed_by, {}) == [False]


def shown(progress_bar: bool) -> dict[str, list[str]]:
    monitor = Zero3Monitor(progress_bar=progress_bar)
    trainer = fit(Regression(), Pairs(), "zero3_fast", steps=2, callbacks=[monitor])
    assert monitor.latest.keys() <= trainer.callback_metrics.keys()
    return {"bar": sorted(trainer.progress_bar_metrics), "logger": sorted(monitor.latest)}


def test_the_progress_bar_shows_step_microstep_and_peak_memory(ranks):
    assert ranks(1).run(shown, False)[0]["bar"] == []
    seen = ranks(1).run(shown, True)[0]
    assert seen["bar"] == ["host_peak_gib", "step_microstep"]
    assert not set(seen["bar"]) & set(seen["logger"])
    # A CPU's memory isn't a GPU's, and its peak isn't known.
    assert not [name for name in seen["logger"] if "allocat" in name or "reserved" in name or name == names.MFU]


@pytest.mark.parametrize("peak", [0, -1e12, float("nan"), float("inf")])
def test_a_peak_that_is_none_is_refused(peak):
    with pytest.raises(SetupError, match="peak_flops="):
        Zero3Monitor(peak_flops=peak)


def utilisation(flops_per_batch: Any) -> tuple[bool, list[str]]:
    monitor = Zero3Monitor(peak_flops=PEAK, flops_per_batch=flops_per_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Regression(), Pairs(), "zero3_fast", steps=1, callbacks=[monitor])
    return names.MFU in monitor.latest, [str(each.message) for each in caught if "step/mfu" in str(each.message)]


def of_each_batch(_: Any) -> float:
    return 1e6


def test_a_model_whose_flops_are_not_known_has_no_mfu_unless_the_user_counts(ranks):
    logged, (warning,) = ranks(1).run(utilisation, None)[0]
    assert not logged
    assert "holds 0 Hugging Face models" in warning
    assert ranks(1).run(utilisation, of_each_batch)[0] == (True, [])
