"""The process in which a structure is found out: a setup's JSON on stdin, one line of JSON in a file.

``python -m lightning_zero3.plan.child FILE``. DeepSpeed keeps process groups, hooks and counters for the whole process,
so a plan has one of its own, and the one that asks may train afterwards. DeepSpeed prints on both streams; hence the
file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_zero3.config import SetupError
from lightning_zero3.plan.rehearsal import Rehearsal, Scene, rehearse
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import Structure


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
        scenes: What is rehearsed, one after the other on the same engine.

    Returns:
        The structure, and a rehearsal for each scene.

    Raises:
        SetupError: The run can't be set up; the message is that which training would give, or the last line of what
            DeepSpeed said.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "structure.json"
        # Not -P or PYTHONSAFEPATH: a clone's package is found as the caller's was.
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "lightning_zero3.plan.child", str(answer)],
            input=json.dumps({"setup": setup.to_json(), "scenes": [asdict(scene) for scene in scenes]}),
            env=_environment() | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.exists():
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise SetupError(f"The plan's own process failed: {said}")
        found = json.loads(answer.read_text())
    if "error" in found:
        raise SetupError(found["error"])
    return Structure.from_json(found["structure"]), tuple(map(Rehearsal.from_json, found["rehearsals"]))


def _environment() -> dict[str, str]:
    """This process's, without what a launcher said about ranks, and with DeepSpeed on the host."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "MASTER_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    return kept | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def answer(setup: Setup, scenes: Sequence[Scene] = ()) -> dict[str, Any]:
    """A structure and rehearsals, or an error, as JSON; in a process that does nothing else.

    Args:
        setup: The run.
        scenes: What is rehearsed.
    """
    from lightning_zero3.plan.build import build
    from lightning_zero3.plan.extract import structure_of
    from lightning_zero3.plan.fake_world import fake_world
    from lightning_zero3.plan.models import load_model, one_line

    try:
        planned = load_model(setup)
        with fake_world(setup.rank, setup.world_size, setup.devices):
            built = build(setup, planned)
            structure = structure_of(built.module, built.optimizer, model_parameters=built.model_parameters)
            rehearsals = [rehearse(built.engine, built.module.model, scene) for scene in scenes]
            return {"structure": structure.to_json(), "rehearsals": [each.to_json() for each in rehearsals]}
    except SetupError as error:
        return {"error": one_line(error)}
    except Exception as error:  # Of DeepSpeed, Transformers or torch: whoever reads it can't use a traceback.
        return {"error": f"{type(error).__name__} while the run was set up: {one_line(error)}"}


def main() -> None:
    """Read a setup, write the answer."""
    asked = json.load(sys.stdin)
    scenes = [Scene(**scene) for scene in asked["scenes"]]
    Path(sys.argv[1]).write_text(json.dumps(answer(Setup.from_json(asked["setup"]), scenes)))


if __name__ == "__main__":
    main()
