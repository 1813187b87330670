# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 plan`` as a user runs it: what it prints, and what it says to input that can't be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.moe import ep_kernels

from lightning_zero3 import cli
from tests.models import tiny, tiny_composite

ROOT = Path(__file__).parents[3]
DENSE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
# The command in a process that has imported nothing, and then the most memory that the plan's own process took.
WITH_MEMORY = """
import resource, sys
from lightning_zero3 import cli
status = cli.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def folder_with(folder: Path, text: object) -> str:
    (folder / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return str(folder)


def assert_refused(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert message in err


@pytest.mark.slow
def test_the_reports_glm_on_a_laptop():
    command = [sys.executable, "-c", WITH_MEMORY]
    sizes = ["--nodes", "4", "--devices", "8", "--expert-parallel-size", "8"]
    arguments = ["plan", "--recipe", "glm45air", *sizes, "--rehearse=false", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # One object, and nothing of DeepSpeed's before or after it.
    assert len(done.stdout.splitlines()) == 1
    found = json.loads(done.stdout)
    assert found["model_parameters"] == 106_852_245_504
    assert (found["sub_groups"], found["parameters"]) == (137, 735)
    assert found["elements_per_rank"] == 3_339_132_672
    assert found["gradient_clear_visits_per_sub_group"] == 100_695
    assert found["gradient_clear_visits_ours"] == 735
    once = found["deepspeed"] != "0.19.7"
    assert found["gradient_clear_visits_stock"] == (735 if once else 100_695)
    assert found["second_copy_gib"] == 0
    assert found["memory_gib"] is None
    assert {message["kind"] for message in found["bytes_sent_per_step"]} >= {
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }
    assert set(found["lower_bounds_seconds"]) == {"H100", "H200", "B200", "MI300X"}
    # Whole, the model's weights alone would take 199 GiB.
    assert int(done.stderr.splitlines()[-1]) / 2**20 < 1


@pytest.mark.slow
def test_tables_for_people_and_nothing_left_behind(tmp_path, capfd):
    tiny("glm").save_pretrained(tmp_path)
    before = dict(os.environ)
    arguments = ["plan", "--model", str(tmp_path), "--devices=2", "--expert_parallel_size", "2", "--layers", "2"]
    if not hasattr(ep_kernels, "permute_rows_supported"):  # DeepSpeed 0.19.7
        assert cli.main(arguments) == 2
        assert "--rehearse=false" in capfd.readouterr().err
        return
    assert cli.main([*arguments, "--bf16-masters"]) == 0
    out = capfd.readouterr().out
    assert "the first 2 of 3 layers" in out
    assert "sub-groups" in out
    said = " ".join(out.split())
    assert "masters are the weights themselves" in said
    for heading in ("Memory of one rank", "What a rank sends in a step", "Least times of a step"):
        assert heading in said
    assert "of an H200: leaves" in said
    assert "[deepspeed]" not in out.lower()
    # This process may train next.
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_text_model_of_text_and_vision(tmp_path, capfd):
    tiny_composite("qwen3_5").save_pretrained(tmp_path)
    assert cli.main(["plan", "--model", str(tmp_path), "--devices", "2", "--expert-parallel-size", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {kind["kind"] for kind in found["kinds"]} == {"dense", "expert", "router"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "recipe"),
        ("--recipe glm45", "Did you mean glm45air?"),
        ("--recipe glm45air --model here", "one of them"),
        ("--recipe glm45air --devices 7", "expert_parallel_size=8 doesn't divide the 7 ranks"),
        ("--recipe glm45air --nodes x", "--nodes 'x': int is expected"),
        ("--recipe glm45air --nodes 0", "--nodes 0"),
        ("--recipe glm45air --nodes 99999", "799,992 ranks"),
        ("--recipe glm45air --layers 99", "has 46"),
        ("--recipe glm45air --layers 0", "--layers 0"),
        ("--recipe glm45air --layers -1", "--layers -1"),
        ("--recipe glm45air --sequence-length 1e99", "--sequence_length"),
        ("--recipe glm45air --precision fp8", "'32-true', 'bf16-mixed', 'bf16-true'"),
        ("--recipe glm45air --json=maybe", "--json 'maybe'"),
        ("--recipe glm45air --precision 32-true --bf16-masters", "bf16_masters"),
        ("--recipe glm45air --max-group-size -5", "--max_group_size -5"),
        ("--recipe glm45air --rank 8", "0 to 7"),
        ("--recipe glm45air --bogus 1", "bogus"),
        ("--recipe glm45air --gpu H1000", "H100, H200, B200, MI300X"),
        ("--recipe glm45air --chart here.png", "--sweep"),
        ("--recipe glm45air --sweep --chart no/such/folder/here.png", "can't be written"),
        ("--recipe glm45air --sweep --chart here.txt", ".png"),
        ("--recipe glm45air --sweep --max", "one of them"),
        ("--recipe", "--recipe"),
        ("--model no/such/folder", "no/such/folder"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(arguments, message, capfd):
    assert_refused(arguments.split(), message, capfd)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "isn't JSON"),
        ("\0\xff", "isn't JSON"),
        ([1], "no model_type"),
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "llama"}, "doesn't say hidden_size"),
        ({"model_type": "llama", **DENSE, "hidden_size": -64}, "config.json"),
        ({"model_type": "llama", **DENSE, "hidden_size": "wide"}, "config.json"),
        ({"model_type": "llama", **DENSE, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}, "num_attention_heads"),
        ({"model_type": "mixtral", **DENSE, "num_local_experts": 4, "num_experts_per_tok": 9}, "9 of 4 experts"),
        ({"model_type": "llama", **DENSE, "linear_num_value_heads": [4, 4]}, "sizes can't be read"),
        ({"model_type": "vit", **DENSE}, "no causal language model"),
    ],
)
def test_a_config_that_cannot_be_planned_is_one_line_and_status_2(config, message, tmp_path, capfd):
    assert_refused(["--model", folder_with(tmp_path, config)], message, capfd)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        pytest.param(
            {"model_type": "llama", **DENSE},
            ["--expert-parallel-size", "2"],
            "No AutoEP preset",
            marks=pytest.mark.slow,
        ),
        # Found when the model is built.
        ({"model_type": "llama", **DENSE, "intermediate_size": 10**17}, [], "while the run was set up"),
    ],
)
def test_what_only_the_set_up_finds_is_one_line_too(config, arguments, message, tmp_path, capfd):
    assert_refused(["--model", folder_with(tmp_path, config), "--devices", "2", *arguments], message, capfd)
