# SPDX-License-Identifier: Apache-2.0
"""The files that start a recipe on many nodes: what can be known of them without a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.test_launchers import environment
from tests.recipes.recipes import RECIPES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
SCRIPTS = ("torchrun.sh", "slurm.sbatch", "network.sh")
# Prints what it was called with, and the environment's part that matters.
RECORD = '#!/usr/bin/env bash\nprintf "%s\\n" "$(basename "$0")" "$@" >> "$CALLS"\nexit "${{STATUS_OF_{name}:-0}}"\n'


@pytest.fixture
def stand_ins(tmp_path) -> dict[str, str]:
    """``srun``, ``scontrol`` and ``python`` that only write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "python"):
        (folder / name).write_text(RECORD.format(name=name))
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, CALLS=str(tmp_path / "calls"))


def calls(variables: dict[str, str]) -> list[str]:
    path = Path(variables["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_shell_can_read_them(script):
    assert subprocess.run(["bash", "-n", str(LAUNCH / script)], check=False).returncode == 0
    shellcheck = shutil.which("shellcheck")
    if shellcheck:
        command = [shellcheck, "-x", str(LAUNCH / script)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def slurm(variables: dict[str, str], status: int) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(ROOT)}
    called = ("recipes/qwen35.py", "--seed", "3")
    return run("slurm.sbatch", *called, **variables, **job, STATUS_OF_srun=str(status), NETWORK="efa")


def test_a_slurm_job_goes_back_into_the_queue_when_it_has_saved_and_only_then(stand_ins):
    started = ["srun", "--kill-on-bad-exit=1", "python", "recipes/qwen35.py", "--seed", "3", "--num_nodes", "4"]
    started += ["--devices", "8", "--resume", "auto"]
    for status, queued in ((0, False), (1, False), (75, True)):
        done = slurm(stand_ins, status)
        assert done.returncode == (0 if queued else status), done.stderr
        assert calls(stand_ins) == [*started, *(["scontrol", "requeue", "4711"] if queued else [])]
        Path(stand_ins["CALLS"]).unlink()


def test_slurm_is_asked_for_what_the_recipe_needs():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH "))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "8", "8")
    assert "requeue" in asked
    assert asked["signal"].startswith("USR1@")  # to the tasks; B:USR1 would go to the script
    # Under these names Lightning takes a job for an interactive one.
    assert asked["job-name"] not in ("bash", "interactive")


def test_torchrun_is_called_for_any_recipe_and_file(stand_ins):
    nodes = {"HEAD": "node0", "NNODES": "2", "GPUS": "4"}
    done = run("torchrun.sh", "recipes/glm45air.py", "--config", "x.yaml", **stand_ins, **nodes)
    assert done.returncode == 0, done.stderr
    called = calls(stand_ins)
    assert called[:3] == ["python", "-m", "torch.distributed.run"]
    assert called[called.index("--rdzv-endpoint") + 1] == "node0:29500"
    assert called[-7:] == ["recipes/glm45air.py", "--config", "x.yaml", "--num_nodes", "2", "--devices", "4"]
    for arguments, variables in (((), {"HEAD": "node0"}), (("recipes/glm45air.py",), {})):
        refused = run("torchrun.sh", *arguments, **stand_ins, **variables)
        assert refused.returncode == 2
        assert refused.stderr.startswith("HEAD=NODE ")


def network(**variables: str) -> dict[str, str]:
    """The environment after sourcing."""
    command = ["bash", "-c", f"set -eu; source {LAUNCH / 'network.sh'}; env"]
    kept = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def test_networks():
    efa = network(NETWORK="efa", IFNAME="eth0")
    assert (efa["FI_PROVIDER"], efa["NCCL_SOCKET_IFNAME"], efa["GLOO_SOCKET_IFNAME"]) == ("efa", "=eth0", "eth0")
    infiniband = network(NETWORK="infiniband", IB_HCA="=mlx5_0", NCCL_IB_TIMEOUT="23")
    assert (infiniband["NCCL_IB_HCA"], infiniband["NCCL_IB_TIMEOUT"]) == ("=mlx5_0", "23")
    assert "FI_PROVIDER" not in infiniband
    assert not [name for name in network(NETWORK="ethernet") if name.startswith(("FI_", "NCCL_IB_", "NCCL_SOCKET"))]
    assert network()["NCCL_DEBUG"] == "WARN"
    with pytest.raises(subprocess.CalledProcessError):
        network(NETWORK="token ring")


def test_every_variable_has_an_explanation_with_its_source():
    lines = (LAUNCH / "network.sh").read_text().splitlines()
    exported = [number for number, line in enumerate(lines) if line.strip().startswith("export ")]
    assert len(exported) >= 8
    for number in exported:
        above = number - 1
        while not lines[above].strip().startswith("#"):
            above -= 1
        comment = []
        while lines[above].strip().startswith("#"):
            comment.append(lines[above])
            above -= 1
        assert any(f"[{source}]" in line for line in comment for source in ("nccl", "efa", "fi_efa", "ofi", "torch"))


@pytest.fixture
def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_pods_find_each_other(kubernetes):
    service, job = kubernetes
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"
    # A label that the Job's controller puts on each pod.
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"]) == 4
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["GPUS"]) == 8
    # Kubernetes replaces $(NAME) by variables that stand before.
    names = [entry["name"] for entry in container["env"]]
    assert variables["LOCAL_ADDR"] == "$(POD_IP)"
    assert names.index("POD_IP") < names.index("LOCAL_ADDR")


def test_a_failed_pod_is_replaced_and_goes_on(kubernetes):
    _, job = kubernetes
    pod = job["spec"]["template"]["spec"]
    # A policy for failures takes pods that are never restarted in place.
    assert pod["restartPolicy"] == "Never"
    assert job["spec"]["backoffLimit"] % job["spec"]["completions"] == 0
    labels = job["spec"]["template"]["metadata"]["labels"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    # What it runs is there, and the recipe takes its options.
    assert container["command"] == ["bash", "recipes/launch/torchrun.sh"]
    recipe, *arguments = container["args"]
    assert all(isinstance(argument, str) for argument in container["args"])
    assert (ROOT / recipe).is_file()
    settings = RECIPES[Path(recipe).stem].RECIPE.parse(
        [str(ROOT / text) if text.endswith(".yaml") else text for text in arguments]
    )
    assert (settings.resume, settings.benchmark) == ("auto", False)
    assert settings.checkpoint_every is not None
    assert str(settings.output).startswith(f"{mounted['runs']}/")
