# SPDX-License-Identifier: Apache-2.0
"""``--ab SWITCH``: both arms of a recipe in alternation on real ranks, what is printed, kept and refused."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import glm45air
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_zero3 import cli
from lightning_zero3.capabilities.fixes import GRAD_CLEAR, parts_to_leave_out
from lightning_zero3.config import SetupError
from lightning_zero3.metrics.names import COLLECTIVES_PER_STEP, GRAD_CLEAR_VISITS, LOSS
from lightning_zero3.metrics.summary import read_metrics
from shared.ab import train_both, why_the_same
from tests.recipes.test_runs import ROOT, run

GLM = glm45air.RECIPE
SHORT = ("--sequence_length", "32", "--micro_batch_size", "1", "--max_tokens", "20000", "--max_steps", "4")


def both_arms(ranks: int, *arguments: str) -> dict[str, Any]:
    """Train both arms on these ranks: what was printed, what was kept, and engines that still hold an optimizer."""
    settings = GLM.parse([*SHORT, "--devices", str(ranks), *arguments])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        folder = train_both(GLM, settings)
    gc.collect()
    alive = [
        each for each in gc.get_objects() if type(each) is DeepSpeedEngine and hasattr(each.optimizer, "optimizer")
    ]
    return {"printed": printed.getvalue(), "folder": str(folder), "alive": len(alive)}


def test_both_arms_in_alternation_and_the_comparison(ranks, tmp_path, capsys):
    seen = ranks(1).run(both_arms, 1, "--ab", "coalesce_grad_norms", "--output", str(tmp_path))[0]
    assert seen["alive"] == 0
    folder = Path(seen["folder"])
    report = json.loads((folder / "comparison.json").read_text())
    places = {arm: [Path(run["path"]).name for run in report["runs"][arm]] for arm in "ab"}
    assert places == {"a": ["version_0", "version_3"], "b": ["version_1", "version_2"]}
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for number, (name, arm) in enumerate([("off", "a"), ("on", "b"), ("on", "b"), ("off", "a")], start=1):
        assert f"coalesce_grad_norms {name}, run {number} of 4" in seen["printed"], arm

    # Same weights, same data, and a switch that changes no bit: in all four, over all steps.
    metrics = [read_metrics(tmp_path / f"version_{number}" / "metrics.csv") for number in range(4)]
    assert len(metrics[0][LOSS]) == 4
    assert all(of_run[LOSS] == metrics[0][LOSS] for of_run in metrics)
    assert report["loss"] == {"step1_identical": True, "largest_difference": 0}
    assert report["noise_floor"]["loss"] == {"step1_identical": True, "largest_difference": 0}
    # The switch was really off and on.
    counted = report["metrics"][COLLECTIVES_PER_STEP]
    assert (counted["n_a"], counted["n_b"]) == (6, 6)
    assert counted["min_a"] > counted["max_b"]

    # What is printed is what `compare` says of the same runs.
    said = seen["printed"].splitlines()
    command = next(line for line in said if "lightning-zero3 compare" in line).partition("lightning-zero3 ")[2].split()
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main([*command, "--markdown"]) == 0
    assert capsys.readouterr().out == (folder / "comparison.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "options"),
    [
        ("alias_master_weights", ()),
        ("batch_optimizer_step", ("--sub_group_size", "20000", "--ab_rounds", "1")),
        ("skip_redundant_release", ()),
        ("all", ("--expert_parallel_size", "2")),
    ],
)
def test_other_switches_on_two_ranks_change_no_bit(ranks, tmp_path, switch, options):
    arguments = ("--ab", switch, "--output", str(tmp_path), *options)
    seen = ranks(2).run(both_arms, 2, *arguments)[0]
    report = json.loads((Path(seen["folder"]) / "comparison.json").read_text())
    assert report["loss"] == {"step1_identical": True, "largest_difference": 0}
    assert (report["noise_floor"] is None) is ("--ab_rounds" in options)
    if switch == "all":
        assert "all switches off, run 1 of 4" in seen["printed"]
        counted = report["metrics"][COLLECTIVES_PER_STEP]
        assert counted["min_a"] > 10 * counted["max_b"]
    if switch in ("alias_master_weights", "all"):
        introduced = [line for line in seen["printed"].splitlines() if "without a second copy" in line]
        shared = [line.rpartition(", ")[2].split()[0] for line in introduced]
        assert shared[0] == shared[3] == "0"
        assert shared[1] == shared[2] != "0"


@pytest.mark.slow
def test_two_processes_by_lightnings_launcher_stay_for_all_fits(tmp_path):
    done = run(*SHORT, "--devices", "2", "--ab", "batch_optimizer_step", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("on each of 2 ranks") == 4
    assert "Loss: bit-identical at step 1, and after it" in done.stdout
    assert len(list(tmp_path.glob("ab_*"))) == 1
    assert len(list(tmp_path.glob("version_*"))) == 4


@pytest.mark.skipif(GRAD_CLEAR.mended(DeepSpeedZeroOptimizer_Stage3), reason="this DeepSpeed clears once by itself")
def test_the_clear_and_what_a_visit_costs(ranks, tmp_path):
    arguments = ("--ab", "scoped_grad_clear", "--batch_optimizer_step", "false", "--output", str(tmp_path))
    seen = ranks(1).run(both_arms, 1, *arguments)[0]
    report = json.loads((Path(seen["folder"]) / "comparison.json").read_text())
    visits = report["metrics"][GRAD_CLEAR_VISITS]
    assert visits["saved"] > 0
    assert report["cost_per_avoided_visit"]["avoided_visits"] == visits["saved"]
    assert "parameter visits avoided per step" in seen["printed"]


def same_code() -> list[tuple[tuple[str, ...], str]]:
    """Options under which both arms run the same code with this DeepSpeed, and words of the reason."""
    clear = "does this by itself. In 0.19.7" if GRAD_CLEAR.mended(DeepSpeedZeroOptimizer_Stage3) else "The merged step"
    return [
        (("--ab", "scoped_grad_clear"), clear),
        (("--ab", "alias_master_weights", "--precision", "bf16-mixed"), "masters are fp32 and weights bf16"),
    ]


@pytest.mark.parametrize(("options", "reason"), same_code())
def test_arms_that_run_the_same_code_are_refused_before_a_process_is_started(
    options, reason, tmp_path, monkeypatch, capsys
):
    def none(*arguments: object, **named: object) -> None:
        raise AssertionError(f"a process is started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", none)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes" / "glm45air.py")])
    with pytest.raises(SystemExit) as ended:
        GLM.main([*options, "--output", str(tmp_path / "runs")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"glm45air.py: {' '.join(options[:2])}: both arms would run the same code. ")
    assert reason in line
    assert not torch.distributed.is_initialized()
    assert not (tmp_path / "runs").exists()


def test_which_switches_make_a_difference():
    left_out = parts_to_leave_out(DeepSpeedZeroOptimizer_Stage3)
    for switch in (
        "coalesce_grad_norms",
        "batch_optimizer_step",
        "coalesce_persistent_gather",
        "skip_redundant_release",
    ):
        assert (why_the_same(GLM.parse(["--ab", switch])) is None) is (switch not in left_out)
    assert why_the_same(GLM.parse(["--ab", "alias_master_weights"])) is None
    masters = ("--precision", "bf16-true", "--bf16_masters", "true")
    assert why_the_same(GLM.parse(["--ab", "alias_master_weights", *masters])) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ab", "verify_parallel"), "ab"),
        (("--ab", "batch_optimizer_step", "--ab_rounds", "0"), "--ab_rounds 0: 1 or more"),
        (("--ab", "batch_optimizer_step", "--max_steps", "2"), "3 or more"),
        (("--ab", "batch_optimizer_step", "--resume"), "--resume out"),
        (("--ab", "batch_optimizer_step", "--checkpoint_every", "5"), "--checkpoint_every and --resume out"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message):
    with pytest.raises(SetupError, match=message):
        GLM.parse(arguments)
