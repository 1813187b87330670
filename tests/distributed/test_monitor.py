"""``Zero3Monitor`` in real fits: what it logs, over ranks, on which steps, and what it keeps out."""

import contextlib
import io
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.metrics import names, over_ranks
from lightning_zero3.metrics.summary import read_metrics
from lightning_zero3.substitution import substituted
from tests.fits import Language, Pairs, Regression, Sentences, fit
from tests.models import build_glm, tiny_glm

TIMES = {names.STEP_MICROSTEP, names.FWD_MICROSTEP, names.BWD_MICROSTEP, names.STEP_TOTAL, names.DATA_WAIT}
HOST = {names.HOST_RSS, names.HOST_RSS_PEAK}


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
    assert "microstep" not in printed.getvalue()
    assert trainer.strategy.model.wall_clock_breakdown()
    torch.distributed.barrier()
    return read_metrics(f"{folder}/run/metrics.csv") if trainer.is_global_zero else {}


def test_times_and_host_memory_are_logged_every_step_as_the_slowest_ranks(ranks, tmp_path):
    metrics = ranks(2).run(logged, str(tmp_path), 0.05, 0.0, {"limit_val_batches": 0})[0]
    assert set(metrics) == TIMES | HOST
    for name in metrics:
        assert sorted(metrics[name]) == [0, 1, 2, 3, 4], name
    # Rank 1 sleeps twice as long as rank 0, in forward and nowhere else.
    for step in range(5):
        assert metrics[names.FWD_MICROSTEP][step] >= 100
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
        assert metrics[names.STEP_TOTAL][step] >= 2 * 20
        assert metrics[names.STEP_TOTAL][step] > metrics[names.FWD_MICROSTEP][step] >= 20


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


def tokens() -> dict[str, float]:
    config = tiny_glm()
    trainer = fit(
        Language(build_glm(config, seed=1)),
        Sentences(config.vocab_size, sequence_length=16),
        Zero3FastStrategy(),
        steps=2,
        callbacks=[Zero3Monitor()],
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_tokens_per_second_are_of_all_ranks_over_the_slowest_step(ranks):
    for metrics in ranks(2).run(tokens):
        # Two ranks, two samples each, sixteen tokens each.
        expected = 2 * 2 * 16 / (metrics[names.STEP_TOTAL] / 1e3)
        assert metrics[names.TOKENS_PER_SECOND] == pytest.approx(expected, rel=1e-4)


def shown() -> dict[str, list[str]]:
    trainer = fit(Regression(), Pairs(), "zero3_fast", steps=2, callbacks=[Zero3Monitor()])
    return {"bar": sorted(trainer.progress_bar_metrics), "logger": sorted(trainer.logged_metrics)}


def test_the_progress_bar_shows_step_microstep_and_peak_memory(ranks):
    seen = ranks(1).run(shown)[0]
    assert seen["bar"] == ["host_peak_gib", "step_microstep"]
    assert not set(seen["bar"]) & set(seen["logger"])
    assert not [name for name in seen["logger"] if "allocated" in name or "reserved" in name]
