# SPDX-License-Identifier: Apache-2.0
"""SIGUSR1 under SLURM, and SIGTERM: all ranks save after the same step, end, and the next start goes on exactly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.preempted_script import Signal, counted_notes
from tests.distributed.test_launchers import ROOT, environment
from tests.resumes import fitted

SCRIPT = Path(__file__).with_name("preempted_script.py")
# Two epochs of four batches on each rank, each with a validation of two after its second and fourth.
OPTIONS = {"accumulate_grad_batches": 2, "val_check_interval": 2, "scheduler": "plateau"}
STEPS = 4
VALIDATIONS = 4


def scheduler(folder: Path) -> Path:
    """A folder with an ``scontrol`` that writes down what it is asked to do."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    command = binaries / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    command.chmod(0o755)
    return binaries


def job(folder: Path, asked: dict[str, Any], tasks: int = 2) -> tuple[list[int], list[dict[str, Any]], str]:
    """Run the script as a job: exit statuses, what each rank says, and all output."""
    processes = []
    for rank in range(tasks):
        variables = environment(
            PATH=f"{scheduler(folder)}{os.pathsep}{os.environ['PATH']}",
            SLURM_JOB_ID="4711",
            SLURM_JOB_NAME="train",
            SLURM_NTASKS=str(tasks),
            SLURM_NTASKS_PER_NODE=str(tasks),
            SLURM_NODELIST="localhost",
            SLURM_NODEID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        defaults = {"folder": str(folder), "number": None, "rank": 0, "at": "train", "batch": 0, "options": OPTIONS}
        command = [sys.executable, str(SCRIPT), json.dumps({**defaults, **asked})]
        processes.append(
            subprocess.Popen(
                command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [json.loads(line) for output in outputs for line in re.findall(r"RESULT (\{.*\})", output)]
    return [process.returncode for process in processes], lines, "\n".join(outputs)


def whole_run() -> dict[str, Any]:
    """The same without a scheduler and a signal, on a rank of the tests."""
    with counted_notes() as notes:
        _, module, _ = fitted(None, None, **OPTIONS)
    return {"notes": len(notes), "events": [event for event in module.events if event[0] != "log"]}


def interrupted_and_whole(ranks: Any, folder: Path, asked: dict[str, Any]) -> str:
    """A job with a signal and its next start, against a run without: the output of the first."""
    whole = ranks(2).run(whole_run)
    # One small all-reduce for each step and each validation, where Lightning broadcasts before each batch.
    assert {line["notes"] for line in whole} == {STEPS + VALIDATIONS}
    statuses, first, stopped = job(folder, asked)
    assert statuses == [75, 75], stopped
    assert (folder / "hpc_ckpt_1.ckpt" / "checkpoint").is_dir()
    assert not list(folder.glob("*unfinished*"))
    statuses, second, output = job(folder, {})
    assert statuses == [0, 0], output
    for rank in range(2):
        assert 0 < len(first[rank]["events"]) < len(whole[rank]["events"])
        assert first[rank]["events"] + second[rank]["events"] == whole[rank]["events"], rank
    return stopped


@pytest.mark.slow
def test_slurms_signal_on_one_rank_within_a_step(ranks, tmp_path):
    asked = {"number": signal.SIGUSR1, "rank": 1, "at": "train", "batch": 4}
    stopped = interrupted_and_whole(ranks, tmp_path, asked)
    assert "Stopped by a signal after step 3 and saved" in stopped
    assert "job 4711 is back in the queue" in stopped
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["train", "validate"])
@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_sigterm_saves_and_does_not_requeue(ranks, tmp_path, rank, at):
    """In a validation too, which is finished first."""
    stopped = interrupted_and_whole(ranks, tmp_path, {"number": signal.SIGTERM, "rank": rank, "at": at, "batch": 3})
    assert "this job's next start goes on from there" in stopped
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 6])
def test_worker_processes_begin_at_the_next_batch(tmp_path, batch):
    """In the first epoch, and in the second, whose order Lightning's workers would miss."""
    options = {"data": "workers", "validate": False}
    (tmp_path / "whole").mkdir()
    statuses, (whole,), output = job(tmp_path / "whole", {"options": options}, tasks=1)
    assert statuses == [0], output
    asked = {"number": signal.SIGTERM, "batch": batch, "options": options}
    statuses, (first,), output = job(tmp_path, asked, tasks=1)
    assert statuses == [75], output
    statuses, (second,), output = job(tmp_path, {"options": options}, tasks=1)
    assert statuses == [0], output
    assert first["events"] + second["events"] == whole["events"]


def stopped_elsewhere(folder: str, checkpoints: bool) -> dict[str, Any]:
    """SIGTERM without SLURM."""
    callbacks = [Signal(signal.SIGTERM, 0, "train", 2)]
    before = signal.getsignal(signal.SIGTERM)
    options = {"default_root_dir": folder, "callbacks": lambda: callbacks, "enable_checkpointing": checkpoints}
    with pytest.raises(SystemExit) as stopped:
        fitted(None, None, validate=False, **options)
    assert signal.getsignal(signal.SIGTERM) == before
    seen = {"status": stopped.value.code, "saved": sorted(path.name for path in Path(folder).glob("hpc*"))}
    if checkpoints:
        again, _, _ = fitted(None, "hpc", validate=False, default_root_dir=folder)
        seen["steps"] = again.global_step
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_elsewhere_saves_where_checkpoints_are_on(ranks, tmp_path, world_size):
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    seen = ranks(world_size).run(stopped_elsewhere, str(tmp_path / "on"), True)[0]
    assert seen == {"status": 75, "saved": ["hpc_ckpt_1.ckpt"], "steps": 8}
    assert ranks(world_size).run(stopped_elsewhere, str(tmp_path / "off"), False)[0] == {"status": 143, "saved": []}
