# SPDX-License-Identifier: Apache-2.0
"""The process in which structures are found out: jobs' JSON on stdin, a file of JSON for each job's answer.

``python -m lightning_zero3.plan.child FOLDER``. DeepSpeed keeps process groups, hooks and counters for the whole
process, so a plan has one of its own, and the one that asks may train afterwards. DeepSpeed prints on both streams;
hence the files. Imports are paid for once: each job is a fork of the process that has imported everything and set up
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_zero3.config import SetupError
from lightning_zero3.plan.rehearsal import Rehearsal, Scene, rehearse
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import Structure

# Jobs at a time, half a GiB each.
_MOST_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be set up.

    Args:
        setup: The run.
        scenes: What is rehearsed on it, one after the other on the same engine.
    """

    setup: Setup
    scenes: tuple[Scene, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """A job's answer.

    Args:
        structure: What one rank holds.
        rehearsals: One for each scene.
    """

    structure: Structure
    rehearsals: tuple[Rehearsal, ...]


def find_structure(setup: Setup) -> Structure:
    """What one rank of a run will hold, found out in a process of its own.

    A minute at most for a model of 60 layers, and half a GiB.

    Args:
        setup: The run.

    Raises:
        SetupError: As :func:`rehearse_run`.
    """
    return rehearse_run(setup, ())[0]


def rehearse_run(setup: Setup, scenes: Sequence[Scene]) -> tuple[Structure, tuple[Rehearsal, ...]]:
    """What one rank of a run will hold, and what its first steps will be like, found out in a process of its own.

    Half a minute more for each scene of a model of 60 layers.

    Args:
        setup: The run.
        scenes: What is rehearsed.

    Returns:
        The structure, and a rehearsal for each scene.

    Raises:
        SetupError: The run can't be set up; the message is that which training would give, or the last line of what
            DeepSpeed said.
    """
    (found,) = find_all([Job(setup=setup, scenes=tuple(scenes))])
    if isinstance(found, SetupError):
        raise found
    return found.structure, found.rehearsals


def find_all(jobs: Sequence[Job]) -> list[Found | SetupError]:
    """Many runs in one process and its forks, as many at a time as there are processors.

    Args:
        jobs: The runs.

    Returns:
        For each job what was found, or why it can't be set up.

    Raises:
        SetupError: The process itself failed.
    """
    if not jobs:
        return []
    with tempfile.TemporaryDirectory() as folder:
        # Not -P or PYTHONSAFEPATH: a clone's package is found as the caller's was.
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "lightning_zero3.plan.child", folder],
            input=json.dumps([asdict(job) for job in jobs]),
            env=_environment() | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if done.returncode:
            raise SetupError(f"The plan's own process failed: {said}")
        return [_read(_answer_file(folder, number), said) for number in range(len(jobs))]


def _answer_file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.json"


def _read(answer: Path, said: str) -> Found | SetupError:
    if not answer.exists():
        return SetupError(f"The plan's own process failed: {said}")
    found = json.loads(answer.read_text())
    if "error" in found:
        return SetupError(found["error"])
    rehearsals = tuple(map(Rehearsal.from_json, found["rehearsals"]))
    return Found(structure=Structure.from_json(found["structure"]), rehearsals=rehearsals)


def _environment() -> dict[str, str]:
    """This process's, without what a launcher said about ranks, and with DeepSpeed on the host."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "MASTER_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    return kept | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def answer(job: Job) -> dict[str, Any]:
    """A structure and rehearsals, or an error, as JSON; in a process that does nothing else.

    Args:
        job: The run.
    """
    from lightning_zero3.plan.build import build
    from lightning_zero3.plan.extract import structure_of
    from lightning_zero3.plan.fake_world import fake_world
    from lightning_zero3.plan.models import load_model, one_line

    setup = job.setup
    try:
        planned = load_model(setup)
        with fake_world(setup.rank, setup.world_size, setup.devices):
            built = build(setup, planned)
            structure = structure_of(built.module, built.optimizer, model_parameters=built.model_parameters)
            rehearsals = [rehearse(built.engine, built.module.model, scene) for scene in job.scenes]
            return {"structure": structure.to_json(), "rehearsals": [each.to_json() for each in rehearsals]}
    except SetupError as error:
        return {"error": one_line(error)}
    except Exception as error:  # Of DeepSpeed, Transformers or torch: whoever reads it can't use a traceback.
        traceback.print_exc()
        return {"error": f"{type(error).__name__} while the run was set up: {one_line(error)}"}


def main() -> None:
    """Read jobs, write the answers."""
    jobs = [_job(each) for each in json.load(sys.stdin)]
    _import_everything(jobs)
    running: dict[int, int] = {}
    for number, job in enumerate(jobs):
        if len(running) >= min(_MOST_AT_ONCE, os.cpu_count() or 1):
            running.pop(os.wait()[0])
        running[_forked(job, _answer_file(sys.argv[1], number))] = number
    while running:
        running.pop(os.wait()[0])


def _job(data: dict[str, Any]) -> Job:
    return Job(setup=Setup.from_json(data["setup"]), scenes=tuple(Scene(**scene) for scene in data["scenes"]))


def _import_everything(jobs: Sequence[Job]) -> None:
    """What every job needs, as far as it can be imported outside of a fake world."""
    import deepspeed  # noqa: F401

    from lightning_zero3.plan import build, extract, fake_world  # noqa: F401
    from lightning_zero3.plan.models import load_model

    with suppress(SetupError):  # the job itself will say it
        load_model(jobs[0].setup)


def _forked(job: Job, file: Path) -> int:
    process = os.fork()
    if process:
        return process
    try:
        file.write_text(json.dumps(answer(job)))
    finally:
        sys.stderr.flush()
        os._exit(0)  # not the parent's way out: nothing here is to be ended twice


if __name__ == "__main__":
    main()
