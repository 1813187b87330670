"""The GLM-4.5-Air recipe, run as a user runs it, and its true size on the meta device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import glm45air
import pytest
import torch

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics, summarise
from shared.run import Settings
from tests.distributed.test_launchers import environment

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "glm45air.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *arguments]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_default_run_learns_from_real_text_in_two_processes_with_expert_parallelism(tmp_path):
    done = run("--max_steps", "80", "--output", str(tmp_path))
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
    ("arguments", "message"),
    [
        (["--size", "full"], "needs GPUs"),
        (["--data", "no/such/file.txt"], "no/such/file.txt"),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--expert_parallel_size", "3"], "expert_parallel_size=3 doesn't divide the 2 ranks"),
        (["--expert_paralel_size", "2"], "expert_paralel_size"),
    ],
)
def test_what_cannot_work_is_refused_in_one_message(arguments, message, tmp_path):
    if torch.cuda.is_available() and "full" in arguments:
        pytest.skip("this machine has GPUs")
    done = run(*arguments, "--output", str(tmp_path))
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_the_full_size_is_glm45air():
    from transformers import Glm4MoeForCausalLM

    config = glm45air.full_config()
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 106_852_245_504
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (46, 1)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (128, 8, 1)


def test_the_full_size_has_the_reports_settings():
    settings = glm45air.SETTINGS["full"]
    assert (settings.micro_batch_size, settings.sequence_length) == (1, 8192)
    assert (settings.precision, settings.expert_parallel_size) == ("bf16-mixed", 8)
    assert settings.recompute_activations


def test_the_tiny_size_keeps_every_kind_of_layer():
    from transformers import Glm4MoeForCausalLM

    def kinds(config):
        with torch.device("meta"):
            model = Glm4MoeForCausalLM(config)
        strip = re.compile(r"\.\d+(?=\.|$)")
        modules = {(strip.sub("", name), type(module).__name__) for name, module in model.named_modules()}
        tensors = {strip.sub("", name) for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        return modules, tensors

    assert kinds(glm45air.tiny_config()) == kinds(glm45air.full_config())
    tiny, full = glm45air.tiny_config(), glm45air.full_config()
    for name in ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "use_qk_norm", "hidden_act"):
        assert getattr(tiny, name) == getattr(full, name), name


def test_overrides_replace_only_what_was_given():
    tiny = glm45air.SETTINGS["tiny"]
    assert tiny.with_overrides(max_steps=3, learning_rate=None) == Settings(
        **{**vars(tiny), "max_steps": 3},
    )
