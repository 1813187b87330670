# SPDX-License-Identifier: Apache-2.0
"""What a comparison concludes: the reports' own conclusions from their figures, and the noise beside a saving."""

import json
import math

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_zero3.compare.read import read_run
from lightning_zero3.compare.report import assemble
from lightning_zero3.compare.tables import sentences
from lightning_zero3.config import SetupError
from lightning_zero3.metrics.names import GRAD_CLEAR_VISITS, GRAD_NORM, LOSS, LOSS_OF_STEP, STEP_MICROSTEP, STEP_TOTAL
from tests.runs import GLM, QWEN, learning, reported, write_csv

FIELDS = [
    *("mean_a", "mean_b", "min_a", "max_a", "min_b", "max_b"),
    *("saved", "ranges_overlap", "t", "df", "n_a", "n_b"),
]


def compared(a: list[str], b: list[str], **options):
    report = assemble([read_run(path) for path in a], [read_run(path) for path in b], **options)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return report


def test_the_report_on_glm(tmp_path):
    a, b = (reported(tmp_path / side, "glm", side) for side in "ab")
    report = compared([a], [b])
    found = report["metrics"][STEP_MICROSTEP]
    assert list(found) == FIELDS
    assert [found[name] for name in FIELDS[:6]] == pytest.approx(
        [GLM["a"][0], GLM["b"][0], *GLM["a"][1:], *GLM["b"][1:]]
    )
    assert found["saved"] == pytest.approx(197.34)
    assert (found["ranges_overlap"], found["n_a"], found["n_b"]) == (False, 9, 9)
    assert found["min_a"] - found["max_b"] == pytest.approx(174, abs=0.5)
    assert report["share_of_step"][STEP_MICROSTEP] == pytest.approx(0.04, abs=0.001)
    assert report["cost_per_avoided_visit"]["avoided_visits"] == 99_960
    assert report["cost_per_avoided_visit"]["microseconds"] == pytest.approx(1.97, abs=0.005)
    assert report["loss"] == {"step1_identical": True, "largest_difference": 0}
    said = sentences(report)
    assert "197.34 ms less, 3.9 % of A's whole step. The ranges don't overlap: 384.76 to 439.35" in said[0]
    assert any("99,960 parameter visits avoided per step: 1.97 µs" in each for each in said)


def test_the_report_on_qwen(tmp_path):
    losses = [13.25, 13.243056, *[13.0] * 8], [13.25, 13.243750, 13.0069, *[13.0] * 7]
    a, b = (reported(tmp_path / side, "qwen", side, losses=of) for side, of in zip("ab", losses, strict=True))
    report = compared([a], [b])
    found = report["metrics"][STEP_MICROSTEP]
    assert [found[name] for name in FIELDS[2:6]] == pytest.approx([*QWEN["a"][1:], *QWEN["b"][1:]])
    assert (found["ranges_overlap"], found["n_a"], found["n_b"]) == (True, 9, 9)
    assert found["t"] == pytest.approx(4.2, abs=0.05)
    assert report["clear"][STEP_MICROSTEP] is True
    assert report["share_of_step"][STEP_MICROSTEP] == pytest.approx(0.0007, abs=5e-5)
    assert report["cost_per_avoided_visit"]["microseconds"] == pytest.approx(0.14, abs=0.005)
    # The whole step went the other way, by more than the optimizer saved.
    assert report["whole_step"]["saved"] == pytest.approx(-17)
    assert report["whole_step"]["drift"] == pytest.approx(-19.73)
    assert report["loss"] == {"step1_identical": True, "largest_difference": pytest.approx(6.9e-3)}
    said = sentences(report)
    assert "The ranges overlap" in said[0]
    assert "but the difference of the means is clear, t = 4.2 over 9 and 9 steps" in said[0]
    assert "17 ms more, where this alone would make it 2.73 ms less" in said[1]
    assert said[1].endswith("so whole steps can't show it.")


def test_the_first_steps_of_each_run_are_left_out(tmp_path):
    runs = [write_csv(tmp_path / str(number), learning(8)) for number in range(3)]
    assert compared(runs[:2], runs[2:])["metrics"][STEP_MICROSTEP]["n_a"] == 14
    found = compared(runs[:2], runs[2:], warmup=4)["metrics"][STEP_MICROSTEP]
    assert (found["n_a"], found["n_b"], found["min_a"]) == (8, 4, 20)
    # From Lightning's step 4 on, as after a resume: its own first step is left out.
    later = {name: {step + 4: value for step, value in of.items()} for name, of in learning(8).items()}
    assert compared([write_csv(tmp_path / "later", later)], runs[:1])["metrics"][STEP_MICROSTEP]["n_a"] == 7


def test_two_runs_of_a_setting_give_the_noise(tmp_path):
    slow, slower = learning(9, optimizer_ms=30), learning(9, optimizer_ms=31, noise=1e-3)
    fast = learning(9, optimizer_ms=25, noise=5e-4)
    a = [write_csv(tmp_path / name, run) for name, run in (("1", slow), ("2", slower))]
    b = [write_csv(tmp_path / "3", fast)]
    assert compared(a[:1], b)["noise_floor"] is None
    report = compared(a, b)
    floor = report["noise_floor"]
    assert floor["means"][STEP_MICROSTEP] == pytest.approx(1)
    expected = max(abs(slow[LOSS][step] - slower[LOSS][step]) for step in range(1, 9))
    assert floor["loss"] == {"step1_identical": True, "largest_difference": expected}
    said = " ".join(sentences(report))
    assert "Means of runs of one setting differ by up to 1 ms: less than what is saved." in said
    assert "within the noise of runs of one setting" in said
    # The other way round, the noise is as large as what is to be shown.
    assert "no less than what is saved" in " ".join(sentences(compared(a, [write_csv(tmp_path / "4", slower)])))


def test_losses_that_begin_differently_and_losses_that_are_no_number(tmp_path):
    run = learning(6)
    nan = {**run, LOSS: {**run[LOSS], 3: math.nan, 4: math.nan}}
    a, b = write_csv(tmp_path / "a", run), write_csv(tmp_path / "b", nan)
    report = compared([a], [b])
    assert report["loss"] == {"step1_identical": True, "largest_difference": None}
    assert report["metrics"][LOSS]["mean_b"] is None
    assert "The loss is NaN or infinite in step 4 and 1 more." in report["notes"]
    later = {name: {step + 2: value for step, value in of.items()} for name, of in run.items()}
    report = compared([a], [write_csv(tmp_path / "c", later)])
    assert report["loss"]["step1_identical"] is None
    assert "begins at different steps" in " ".join(sentences(report))


def test_other_metrics_other_numbers_of_steps_and_resumes_are_said(tmp_path):
    a = write_csv(tmp_path / "a", {**learning(5), GRAD_NORM: {0: 1.0, 1: 2.0}})
    b = write_csv(tmp_path / "b", {**learning(9), GRAD_CLEAR_VISITS: {1: 3.0}, "mine": {1: 1.0}})
    report = compared([a], [b])
    assert (report["only_in_a"], report["only_in_b"]) == ([GRAD_NORM], ["mine", GRAD_CLEAR_VISITS])
    assert report["steps"] == {"a": [5], "b": [9]}
    assert any("A logged 5 steps, B 9" in note for note in report["notes"])
    assert report["grad_norm"] == {"step1_identical": None, "largest_difference": None}
    (tmp_path / "b" / "metrics.csv").write_text("step,train/loss\n0,3\n1,2\n2,2\n1,2\n2,2\n")
    assert any("step 2 is in the log twice" in note for note in compared([a], [b])["notes"])


def test_logs_of_32_and_of_64_bits_of_one_run_are_the_same(tmp_path):
    run = learning(5)
    pytest.importorskip("tensorboard")
    narrow = TensorBoardLogger(tmp_path, name="", version="narrow")
    for step in range(5):
        narrow.log_metrics({name: values[step] for name, values in run.items()}, step)
    narrow.finalize("success")
    report = compared([str(tmp_path / "narrow")], [write_csv(tmp_path / "wide", run)])
    assert report["loss"] == {"step1_identical": True, "largest_difference": 0}
    assert "TensorBoard keeps 32 bits" in " ".join(report["notes"])


def test_one_step_is_no_sample(tmp_path):
    a, b = (write_csv(tmp_path / side, learning(2, optimizer_ms=ms)) for side, ms in (("a", 30), ("b", 20)))
    report = compared([a], [b])
    found = report["metrics"][STEP_MICROSTEP]
    assert (found["saved"], found["t"], found["n_a"], report["clear"][STEP_MICROSTEP]) == (10, None, 1, False)
    assert "too few for a range" in sentences(report)[0]


def test_another_loss(tmp_path):
    run = learning(5)
    losses = run.pop(LOSS)
    a, b = (write_csv(tmp_path / side, {**run, "mine": losses, LOSS_OF_STEP: losses}) for side in "ab")
    assert compared([a], [b])["loss_metric"] == LOSS_OF_STEP
    assert compared([a], [b], loss="mine")["loss"]["largest_difference"] == 0
    with pytest.raises(SetupError, match="--loss yours: not in both"):
        compared([a], [b], loss="yours")


def test_without_times_the_rest_is_compared(tmp_path):
    a, b = (write_csv(tmp_path / side, {"memory/peak_allocated_gib": {0: 1.0, 1: 2.0, 2: 2.5}}) for side in "ab")
    report = compared([a], [b])
    assert (report["first_metric"], report["whole_step"], report["share_of_step"]) == (None, None, {})
    assert report["metrics"]["memory/peak_allocated_gib"]["mean_a"] == 2.25
    whole_only = [write_csv(tmp_path / f"whole{side}", {STEP_TOTAL: {0: 1.0, 1: 2.0, 2: 2.5}}) for side in "ab"]
    assert compared(whole_only[:1], whole_only[1:])["first_metric"] == STEP_TOTAL
