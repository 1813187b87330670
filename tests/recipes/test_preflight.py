# SPDX-License-Identifier: Apache-2.0
"""What is refused before a process group exists or GPU memory is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_zero3.config import SetupError
from shared import preflight
from shared.run import make_strategy
from tests.recipes.recipes import RECIPES


def settings_of(name: str, *arguments: str):
    return RECIPES[name].RECIPE.parse(list(arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "ranks", "message"),
    [
        ("glm45air", ["--expert_parallel_size", "3"], 2, "expert_parallel_size=3 doesn't divide the 2 ranks"),
        ("glm45air", ["--expert_parallel_size", "3"], 3, "expert_parallel_size=3 doesn't divide the 8 experts"),
        ("glm45air", ["--tensor_parallel_size", "3"], 4, "tensor_parallel_size=3 doesn't divide the 4 ranks"),
        ("glm45air", ["--tensor_parallel_size", "4"], 4, "tensor_parallel_size=4 doesn't divide num_key_value_heads"),
        # Its attention stays whole, so its heads don't matter, but the widths of its MLPs do.
        ("minimax_m3", ["--tensor_parallel_size", "3", "--expert_parallel_size", "1"], 3, "expert_parallel_size=1"),
        ("minimax_m3", ["--tensor_parallel_size", "6", "--expert_parallel_size", "2"], 6, "doesn't divide the width"),
    ],
)
def test_sizes_that_do_not_divide(name, arguments, ranks, message):
    settings = settings_of(name, *arguments)

    def set_up() -> None:
        strategy = make_strategy(settings, expert_parallel_size=settings.expert_parallel_size or 2)
        preflight.check_model(RECIPES[name].MODEL_CLASS, RECIPES[name].RECIPE.config(settings), strategy, ranks)

    with pytest.raises(SetupError) as refused:
        set_up()
    assert message in str(refused.value)


def test_the_largest_expert_parallel_size_that_fits_is_chosen_where_none_is_given():
    config = RECIPES["qwen35"].tiny_config()
    assert preflight.expert_parallel_size(settings_of("qwen35"), config, 12) == 4
    assert preflight.expert_parallel_size(settings_of("qwen35", "--expert_parallel_size", "2"), config, 12) == 2
    for name, experts in (("glm45air", 128), ("qwen35", 512), ("minimax_m3", 128)):
        full = RECIPES[name].full_config()
        assert preflight.expert_parallel_size(settings_of(name), full, 1024) == experts


def corpus(tmp_path: Path, words: int = 2000) -> str:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * words)
    return str(text)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (["--data", "no/such/file.txt"], {}, "no/such/file.txt"),
        ([], {"vocab_size": 100}, "256 tokens, the model's vocabulary 100"),
        ([], {"max_position_embeddings": 128}, "--sequence_length 256: the model has 128 positions"),
        (["--sequence_length", "2048"], {}, "--sequence_length 2048: the model has 1024 positions"),
        (["--micro_batch_size", "500"], {}, "takes 1000"),
        (["--micro_batch_size", "500", "--tensor_parallel_size", "2"], {}, "takes 500"),
        (["--tokenizer", "no/such/tokenizer"], {}, "no/such/tokenizer"),
    ],
)
def test_data_that_does_not_fit(tmp_path, arguments, fields, message):
    recipe = RECIPES["glm45air"].RECIPE
    settings = recipe.parse(["--data", corpus(tmp_path), *arguments])
    config = recipe.config(settings)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(SetupError) as refused:
        preflight.check_data(settings, config, ranks=2)
    assert message in str(refused.value)


def test_data_that_fits(tmp_path):
    recipe = RECIPES["glm45air"].RECIPE
    settings = recipe.parse(["--data", corpus(tmp_path), "--max_tokens", "10000"])
    stream, samples = preflight.check_data(settings, recipe.config(settings), ranks=2)
    assert (stream.tokens.size, len(samples)) == (10000, 39)


def test_an_output_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"--output .*file/runs can't be written: Not a directory"):
        preflight.check_output(tmp_path / "file" / "runs")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # A folder that is there and takes no files; the superuser, who runs some test machines, may write anywhere.
    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", refuse)
    with pytest.raises(SetupError, match=r"Permission denied\. Choose another folder"):
        preflight.check_output(tmp_path / "runs")
    monkeypatch.undo()
    preflight.check_output(tmp_path / "runs" / "deep")
    assert list((tmp_path / "runs" / "deep").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--size", "full"], "needs GPUs"), (["--attention", "cudnn"], "sdpa, or")]
)
def test_a_machine_without_gpus(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError, match=message):
        preflight.check_machine(settings_of("glm45air", *arguments), "GLM-4.5-Air")
    preflight.check_machine(settings_of("glm45air"), "GLM-4.5-Air")


def test_processes_are_the_launchers_number_or_two_on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert preflight.local_processes() == 2
    assert preflight.world_size(2, 4) == 8
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert preflight.local_processes() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert preflight.local_processes() == 4
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert preflight.world_size(4, 1) == 12


def test_a_launcher_that_has_started_another_number_of_processes(monkeypatch):
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    preflight.check_launcher(2, 1)
    monkeypatch.setenv("SLURM_NTASKS", "32")
    preflight.check_launcher(8, 4)
    with pytest.raises(SetupError, match=r"--devices 8 on --num_nodes 1 make 8 .* started 32 \(SLURM_NTASKS\)"):
        preflight.check_launcher(8, 1)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    preflight.check_launcher(2, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SetupError, match="WORLD_SIZE"):
        preflight.check_launcher(2, 1)
