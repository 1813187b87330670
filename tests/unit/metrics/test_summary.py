# SPDX-License-Identifier: Apache-2.0
"""Reading of metrics.csv and the arithmetic of a run's summary, on files written by hand and by Lightning."""

import math
from pathlib import Path
from statistics import fmean

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_zero3.metrics.names import LOSS, STEP_MICROSTEP, STEP_TOTAL, TOKENS_PER_SECOND
from lightning_zero3.metrics.summary import (
    RunSummary,
    Spread,
    number_steps,
    read_metrics,
    spread,
    summarise,
)

GPU_PEAK = "memory/peak_allocated_gib"


def write(folder: Path, text: str) -> Path:
    path = folder / "metrics.csv"
    path.write_bytes(text.encode())
    return path


def test_rows_of_one_step_are_merged_and_blanks_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "epoch,step,a,b\r\n0,0,1.5,\r\n0,0,,2.5\r\n,1,,3.5\r\n")
    assert read_metrics(path) == {"a": {0: 1.5}, "b": {0: 2.5, 1: 3.5}}


def test_the_later_row_counts_and_steps_ascend(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, "step,a\n7,1\n3,2\n7.0,4\n\n"))
    assert list(metrics["a"].items()) == [(3, 2.0), (7, 4.0)]


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    values = read_metrics(write(tmp_path, "step,a\n0,nan\n1,inf\n"))["a"]
    assert math.isnan(values[0])
    assert values[1] == math.inf


@pytest.mark.parametrize("last_line", ["2,30.", "2,30.5", "2,", "2", "2\n", "2,3-\n", ",\n", "2,3,4\n"])
def test_a_last_line_that_was_cut_is_skipped(tmp_path: Path, last_line: str) -> None:
    # "2,30.5" might have been 30.57 with its line end: without one, no number of that line can be trusted.
    assert read_metrics(write(tmp_path, f"step,a\n0,10.5\n1,20.5\n{last_line}")) == {"a": {0: 10.5, 1: 20.5}}


def test_a_cut_inside_a_character_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,a\n0,1\n1,\xc3")
    assert read_metrics(path) == {"a": {0: 1.0}}


@pytest.mark.parametrize(
    ("line", "message"),
    [("1", r"line 3: 1 cells under a header of 2"), ("1,x", r"line 3: 'a' is 'x'"), ("1.5,2", r"line 3: .*'1.5'")],
)
def test_a_malformed_line_before_the_last_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_metrics(write(tmp_path, f"step,a\n0,1\n{line}\n2,3\n"))


@pytest.mark.parametrize(
    ("text", "seen"), [("", r"\[\]"), ("step,a", r"\[\]"), ("epoch,a\n0,1\n", r"\['epoch', 'a'\]")]
)
def test_a_file_without_steps_is_refused(tmp_path: Path, text: str, seen: str) -> None:
    with pytest.raises(ValueError, match=rf"no 'step' column.*{seen}.*CSVLogger"):
        read_metrics(write(tmp_path, text))


def test_a_missing_file_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").touch()
    with pytest.raises(FileNotFoundError, match=r"hparams\.yaml.*log_dir"):
        read_metrics(tmp_path / "metrics.csv")
    with pytest.raises(FileNotFoundError, match="it is a folder"):
        read_metrics(tmp_path)
    with pytest.raises(FileNotFoundError, match="empty or absent"):
        read_metrics(tmp_path / "nowhere" / "metrics.csv")


def test_spread_does_not_hide_a_nan() -> None:
    found = spread([1.0, math.nan, 3.0])
    assert found is not None
    assert found.count == 3
    assert all(math.isnan(value) for value in (found.mean, found.minimum, found.maximum))


def test_twelve_steps_by_hand(tmp_path: Path) -> None:
    """Step 1 takes 900 ms. Steps 2 to 10 take 20, ..., 28 ms (mean 24); 11 and 12 take 40 and 50 ms."""
    times = [900, *range(20, 29), 40, 50]
    lines = ["memory/peak_allocated_gib,step,step/step_microstep_ms,step/total_ms,step/tokens_per_second,train/loss"]
    for step, time in enumerate(times):  # as Lightning counts: from 0
        lines.append(f",{step},,,,{12 - step}")
        lines.append(f"{30 + (step == 4)},{step},{time},{10 * time},{1000 * step},")
    summary = summarise(read_metrics(write(tmp_path, "\n".join(lines) + "\n")))

    assert summary == RunSummary(
        steps=12,
        step_microstep_early=Spread(24.0, 20.0, 28.0, 9),
        step_microstep=Spread((9 * 24 + 90) / 11, 20.0, 50.0, 11),
        step_total_early=Spread(240.0, 200.0, 280.0, 9),
        step_total=Spread(10 * (9 * 24 + 90) / 11, 200.0, 500.0, 11),
        tokens_per_second=Spread(6000.0, 1000.0, 11000.0, 11),
        memory={GPU_PEAK: 31.0},
        loss_first=12.0,
        loss_last=1.0,
        loss_last_mean=5.5,  # of 10, 9, ..., 1
    )


@pytest.mark.parametrize("start", [0, 1, 500])
def test_the_first_logged_step_is_step_1_wherever_lightning_starts(start: int) -> None:
    times = {start + at: float(at) for at in range(20)}
    summary = summarise({STEP_MICROSTEP: times})
    assert summary.step_microstep_early == Spread(5.0, 1.0, 9.0, 9)
    assert summary.step_microstep == Spread(10.0, 1.0, 19.0, 19)


def test_a_sparsely_logged_run_has_no_steps_2_to_10() -> None:
    summary = summarise({STEP_TOTAL: {49: 900.0, 99: 20.0, 149: 40.0}})
    assert summary.step_total_early is None
    assert summary.step_total == Spread(30.0, 20.0, 40.0, 2)
    assert summary.steps == 3


def test_memory_and_validation_outside_of_steps_move_no_number() -> None:
    metrics = {
        GPU_PEAK: {9: 99.0, 10: 1.0},
        "val/loss": {9: 7.0},
        TOKENS_PER_SECOND: {11: 5.0},  # not logged at the first step, which the loss tells
        LOSS: {10: 3.0, 11: 2.0},
    }
    assert number_steps(metrics)[GPU_PEAK] == {0: 99.0, 1: 1.0}
    summary = summarise(metrics)
    assert summary.tokens_per_second == Spread(5.0, 5.0, 5.0, 1)
    assert summary.memory == {GPU_PEAK: 99.0}
    assert summary.steps == 2


def test_memory_holds_sizes_only() -> None:
    assert summarise({"memory/allocator_retries": {0: 3.0}, "memory/host_rss_gib": {0: 2.0, 1: 1.0}}).memory == {
        "memory/host_rss_gib": 2.0
    }


def test_nothing_measured() -> None:
    assert summarise({}) == RunSummary(0, None, None, None, None, None, {}, None, None, None)


def test_lightnings_own_logger_is_read(tmp_path: Path) -> None:
    """Two callers log each step, a third one a metric that the header lacks at first: Lightning rewrites the file."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=2)
    for step in range(5):
        logger.log_metrics({LOSS: 5.0 - step, "epoch": 0}, step=step)
        logger.log_metrics({STEP_MICROSTEP: 100.0 / (1 + step)}, step=step)
        if step == 3:
            logger.log_metrics({"memory/host_rss_gib": 1.25}, step=step)
    logger.save()
    metrics = read_metrics(Path(logger.log_dir) / "metrics.csv")

    assert metrics == {
        LOSS: {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0},
        STEP_MICROSTEP: {0: 100.0, 1: 50.0, 2: 100.0 / 3, 3: 25.0, 4: 20.0},
        "memory/host_rss_gib": {3: 1.25},
    }
    assert summarise(metrics).step_microstep == Spread(fmean([50.0, 100.0 / 3, 25.0, 20.0]), 20.0, 50.0, 4)
