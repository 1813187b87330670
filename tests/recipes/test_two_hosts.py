# SPDX-License-Identifier: Apache-2.0
"""Recipes on two hosts with networks of their own: the single host's losses; a host that dies; going on afterwards."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics
from tests.distributed.test_launchers import environment
from tests.hosts import Host, two_hosts
from tests.recipes.recipes import RECIPES

ROOT = Path(__file__).parents[2]
# Layers of each kind: dense and MoE; linear and full attention; full and sparse attention.
LAYERS = {"glm45air": "2", "qwen35": "4", "minimax_m3": "4"}
TIMEOUT = 60
# Of a run that is killed: long enough to be killed in the middle.
STEPS = 40


@pytest.fixture
def hosts(record_property):
    with two_hosts() as pair:
        record_property("hosts", "network namespaces" if pair[0].namespace else "loopback addresses")
        yield pair


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a text that is read again and again\n" for number in range(100)))
    return path


def options(recipe: str, text: Path, output: Path, *more: str) -> list[str]:
    fixed = ["--layers", LAYERS[recipe], "--sequence_length", "32", "--micro_batch_size", "2", "--max_steps", "8"]
    return [*fixed, "--data", str(text), "--output", str(output), *more]


def single_host(recipe: str, arguments: list[str], world_size: int) -> None:
    """On a rank of a pool: the same run on one host, over its loopback."""
    from shared.run import train

    module = RECIPES[recipe].RECIPE
    train(module, module.parse([*arguments, "--devices", str(world_size)]))


def losses(output: Path, version: int = 0) -> dict[int, float]:
    return read_metrics(output / f"version_{version}" / "metrics.csv")[names.LOSS]


def by_torchrun(pair: tuple[Host, Host], each: int, recipe: str, arguments: list[str]) -> None:
    """By the script that is shipped, as its user would on each node."""
    for node, host in enumerate(pair):
        variables = environment(
            OMP_NUM_THREADS="1",
            HEAD=pair[0].address,
            NNODES="2",
            GPUS=str(each),
            LOCAL_ADDR=host.address,
            # Both addresses are this machine's, so which host holds the rendezvous has to be told.
            RDZV_CONF=f"is_host={int(node == 0)}",
            IFNAME=host.interface,
            PYTHON=sys.executable,
        )
        script = str(ROOT / "recipes" / "launch" / "torchrun.sh")
        host.start([script, str(ROOT / "recipes" / f"{recipe}.py"), *arguments], variables, ROOT)


def by_slurm(pair: tuple[Host, Host], each: int, recipe: str, arguments: list[str]) -> None:
    for node, host in enumerate(pair):
        for local in range(each):
            variables = environment(
                OMP_NUM_THREADS="1",
                SLURM_JOB_ID="4711",
                SLURM_JOB_NAME="train",
                SLURM_NNODES="2",
                SLURM_NTASKS=str(2 * each),
                SLURM_NTASKS_PER_NODE=str(each),
                SLURM_NODELIST=",".join(other.address for other in pair),
                SLURM_NODEID=str(node),
                SLURM_PROCID=str(node * each + local),
                SLURM_LOCALID=str(local),
            )
            command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *arguments, "--num_nodes", "2"]
            host.start(command, variables, ROOT)


STARTS = {"torchrun": by_torchrun, "slurm": by_slurm}


def finished(pair: tuple[Host, Host]) -> None:
    for host in pair:
        for status, output in host.finish(timeout=240):
            assert status == 0, output


def wait_for(path: Path, *running: Host) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        for host in running:
            if host.ended:
                pytest.fail(f"a process has ended before {path}:\n" + "\n".join(text for _, text in host.finish(20)))
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def checkpoint(output: Path, version: int, step: int) -> Path:
    return output / f"version_{version}" / "checkpoints" / f"step_{step:08d}" / "completed.json"


def resumed_from(output: Path) -> int:
    """The step of the last complete checkpoint."""
    return max(json.loads(path.read_text())["step"] for path in output.glob("version_0/checkpoints/*/completed.json"))


LONG = ("--max_steps", str(STEPS), "--checkpoint_every", "4", "--keep", "2", "--timeout_seconds", str(TIMEOUT))


def killed_and_resumed(ranks, hosts, text, tmp_path, *, start: str, recipe: str, each: int, victim: int) -> None:
    ours = tmp_path / "two_hosts"
    arguments = options(recipe, text, ours, *LONG, "--expert_parallel_size", str(2 * each))
    STARTS[start](hosts, each, recipe, arguments)
    wait_for(checkpoint(ours, 0, 8), *hosts)
    hosts[victim].kill()
    before = time.monotonic()
    for status, output in hosts[1 - victim].finish(timeout=TIMEOUT + 60):
        assert status != 0
        assert "another process of this run has ended" in output, output
        assert "--resume auto" in output
    assert time.monotonic() - before < TIMEOUT + 60
    hosts[victim].finish(timeout=20)

    done = resumed_from(ours)
    assert 8 <= done < STEPS
    STARTS[start](hosts, each, recipe, [*arguments, "--resume"])
    finished(hosts)

    alone = tmp_path / "one_host"
    whole = options(recipe, text, alone, "--max_steps", str(STEPS), "--expert_parallel_size", str(2 * each))
    ranks(2 * each).run(single_host, recipe, whole, 2 * each)
    expected = losses(alone)
    assert len(expected) == STEPS
    first, second = losses(ours), losses(ours, 1)
    assert len(first) >= 7
    assert first == {step: expected[step] for step in first}
    assert second == dict(list(expected.items())[done:])


@pytest.mark.slow
def test_a_killed_host_ends_the_other_and_a_resume_goes_on_with_the_same_losses(ranks, hosts, text, tmp_path):
    killed_and_resumed(ranks, hosts, text, tmp_path, start="torchrun", recipe="glm45air", each=1, victim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "start", "victim"),
    [("glm45air", "torchrun", 0), ("glm45air", "slurm", 0), ("qwen35", "slurm", 1), ("minimax_m3", "torchrun", 1)],
)
def test_kill_and_resume(ranks, hosts, text, tmp_path, start, recipe, victim):
    """Host 0 holds the rendezvous and rank 0."""
    killed_and_resumed(ranks, hosts, text, tmp_path, start=start, recipe=recipe, each=1, victim=victim)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_kill_and_resume_with_two_processes_each(ranks, hosts, text, tmp_path, start):
    killed_and_resumed(ranks, hosts, text, tmp_path, start=start, recipe="glm45air", each=2, victim=1)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_one_host(ranks, hosts, text, tmp_path, recipe, start, each):
    """Experts are shared by all ranks, so that every all-to-all crosses the hosts."""
    sizes = ("--expert_parallel_size", str(2 * each))
    STARTS[start](hosts, each, recipe, options(recipe, text, tmp_path / "two_hosts", *sizes))
    finished(hosts)
    ranks(2 * each).run(single_host, recipe, options(recipe, text, tmp_path / "one_host", *sizes), 2 * each)
    assert len(losses(tmp_path / "one_host")) == 8
    assert losses(tmp_path / "two_hosts") == losses(tmp_path / "one_host")


@pytest.mark.slow
def test_a_host_that_falls_silent_is_missed_after_the_time_out(hosts, text, tmp_path):
    """A host without power or network says no good-bye: nothing arrives, and nothing is refused."""
    if hosts[0].namespace is None:
        pytest.skip("needs network namespaces")
    arguments = options("glm45air", text, tmp_path / "runs", *LONG, "--expert_parallel_size", "2")
    arguments += ["--timeout_seconds", "15", "--max_steps", "4000"]
    by_slurm(hosts, 1, "glm45air", arguments)
    wait_for(checkpoint(tmp_path / "runs", 0, 8), *hosts)
    hosts[1].unplug()
    for status, output in hosts[0].finish(timeout=120):
        assert status != 0
        assert "hasn't answered within 15 seconds" in output, output


@pytest.mark.slow
def test_slurms_signal_saves_on_both_hosts_and_the_requeued_job_goes_on(ranks, hosts, text, tmp_path):
    ours, alone = tmp_path / "two_hosts", tmp_path / "one_host"
    arguments = options("glm45air", text, ours, *LONG, "--checkpoint_every", "50", "--resume")
    by_slurm(hosts, 1, "glm45air", arguments)
    wait_for(ours / "version_0" / "metrics.csv", *hosts)
    for host in hosts:
        host.signal(signal.SIGUSR1)
    for host in hosts:
        ((status, output),) = host.finish(timeout=240)
        assert status == 75, output
    done = resumed_from(ours)
    assert 0 < done < STEPS
    by_slurm(hosts, 1, "glm45air", arguments)
    finished(hosts)
    ranks(2).run(single_host, "glm45air", options("glm45air", text, alone, "--max_steps", str(STEPS)), 2)
    assert losses(ours, 1) == dict(list(losses(alone).items())[done:])
