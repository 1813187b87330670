# SPDX-License-Identifier: Apache-2.0
"""The recipes, run as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics, summarise
from tests.distributed.test_launchers import environment

ROOT = Path(__file__).parents[2]


def run(*arguments: str, recipe: str = "glm45air") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *arguments]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["glm45air", "qwen35", "minimax_m3"])
def test_the_default_run_learns_from_real_text_in_two_processes_with_expert_parallelism(recipe, tmp_path):
    done = run("--max_steps", "80", "--output", str(tmp_path), recipe=recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on each of 2 ranks" in done.stdout
    assert "Python standard library" in done.stdout
    entropy = float(re.search(r"unigram entropy (\d\.\d+) nats", done.stdout)[1])

    metrics = read_metrics(tmp_path / "version_0" / "metrics.csv")
    summary = summarise(metrics)
    assert summary.steps == 80
    assert summary.loss_first > 5
    # Real text, and a model that has seen more than how often each byte occurs.
    assert 2 < entropy < 4.5
    assert summary.loss_last_mean < entropy
    assert summary.step_microstep_early.count == 9
    assert summary.step_microstep.count == 79
    assert set(summary.memory) == {names.HOST_RSS, names.HOST_RSS_PEAK}
    assert summary.tokens_per_second.mean > 0

    # What a person sees: the table, the chart, both logs.
    assert "step_microstep, steps 2 to 10" in done.stdout
    assert "GPU peak" not in done.stdout
    chart = tmp_path / "version_0" / "chart.png"
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "version_0" / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_other_text_and_a_second_run_beside_the_first(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    line = {"body": "the quick brown fox jumps over the lazy dog. " * 20}
    corpus.write_text("\n".join(json.dumps(line) for _ in range(40)))
    arguments = ("--data", str(corpus), "--text_field", "body", "--output", str(tmp_path / "runs"))
    for number in range(2):
        done = run(*arguments, "--max_steps", "3", "--devices", "1", "--sequence_length", "64")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "on each of 1 ranks" in done.stdout
        assert len(read_metrics(tmp_path / "runs" / f"version_{number}" / "metrics.csv")[names.LOSS]) == 3


@pytest.mark.parametrize(
    "recipe", [pytest.param(n, marks=pytest.mark.slow) for n in ("qwen35", "glm45air", "minimax_m3")]
)
def test_a_benchmark_from_a_file_lists_its_ten_steps(recipe, tmp_path):
    config = ROOT / "recipes" / "configs" / f"{recipe}_tiny.yaml"
    done = run("--config", str(config), "--benchmark", "--output", str(tmp_path), recipe=recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(tmp_path / "version_0" / "metrics.csv")
    assert len(metrics[names.LOSS]) == len(metrics[names.STEP_MICROSTEP]) == 10
    for number, loss in enumerate(metrics[names.LOSS].values(), start=1):
        assert re.search(rf"│ {number}(, warm-up)? +│ +{loss:.6f} ", done.stdout), number
    assert done.stdout.count("warm-up") == 4
    assert "mean of 2 to 10" in done.stdout
    if recipe == "qwen35":
        assert done.stdout.count("flash-linear-attention") == 1
        assert "falling back" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expert_parallel_size", "3"], "expert_parallel_size=3 doesn't divide the 2 ranks"),
        pytest.param(["--expert_paralel_size", "2"], "Did you mean --expert_parallel_size", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_work_is_refused_in_one_message(arguments, message, tmp_path):
    done = run(*arguments, "--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("glm45air.py: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
