# SPDX-License-Identifier: Apache-2.0
"""The ways to start a run on a CPU, each as a user would: alone, Lightning's launcher, torchrun, SLURM variables."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train_script.py")
ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT|SLURM_.*|"
    r"TORCHELASTIC_.*|PL_.*|OMPI_.*|PMI_.*|DS_ACCELERATOR|OMP_NUM_THREADS)$"
)


def environment(**extra: str) -> dict[str, str]:
    """This environment without anything that a launcher would set."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, **extra}


def results(*outputs: str) -> list[dict[str, Any]]:
    lines = [line for output in outputs for line in re.findall(r"RESULT (\{.*?\})", output)]
    return sorted((json.loads(line) for line in lines), key=lambda line: line["rank"])


def run(command: list[str], **extra: str) -> str:
    done = subprocess.run(
        command, env=environment(**extra), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """The run by Lightning's own launcher; the others must give its losses."""
    return results(run([sys.executable, str(SCRIPT), "2"]))


def test_one_process_needs_neither_variables_nor_mpi(two_ranks):
    mpi = subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True, check=False)
    assert mpi.returncode, "mpi4py is installed here, so this test shows nothing: uninstall it"
    (seen,) = results(run([sys.executable, str(SCRIPT), "1"]))
    assert seen["world_size"] == 1
    assert seen["optimizer"] == "FastStage3Optimizer"
    assert len(seen["losses"]) == 3


def test_lightnings_own_launcher(two_ranks):
    assert [seen["rank"] for seen in two_ranks] == [0, 1]
    assert {seen["world_size"] for seen in two_ranks} == {2}
    assert {seen["environment"] for seen in two_ranks} == {"LightningEnvironment"}
    assert two_ranks[0]["losses"] != two_ranks[1]["losses"]


@pytest.mark.slow
def test_torchrun(two_ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(SCRIPT), "2"]
    seen = results(run(command))
    assert {line["environment"] for line in seen} == {"TorchElasticEnvironment"}
    assert [line["losses"] for line in seen] == [line["losses"] for line in two_ranks]


@pytest.mark.slow
def test_slurm_variables(two_ranks):
    def started(rank: int) -> subprocess.Popen[str]:
        variables = environment(
            SLURM_JOB_ID="4711",
            SLURM_JOB_NAME="train",
            SLURM_NTASKS="2",
            SLURM_NTASKS_PER_NODE="2",
            SLURM_NODELIST="localhost",
            SLURM_NODEID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        command = [sys.executable, str(SCRIPT), "2"]
        return subprocess.Popen(
            command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    processes = [started(rank) for rank in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    seen = results(*outputs)
    assert {line["environment"] for line in seen} == {"SLURMEnvironment"}
    assert [line["losses"] for line in seen] == [line["losses"] for line in two_ranks]
