# SPDX-License-Identifier: Apache-2.0
"""The doctor's child: reports on the installed packages, then trains one step; a process that can be ended.

Each section is one line of JSON in the file that the first argument names, written as soon as it is known.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What would make Lightning take this process for one rank of a job, or start others.
_OF_A_JOB = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OF_A_JOB_PREFIXES = ("SLURM_", "TORCHELASTIC_", "PET_", "OMPI_", "PMI_", "LSB_")


def main(answers: Path) -> None:
    """Write all sections, then the trial's result.

    Args:
        answers: The file to write to.
    """
    # So that torch gives up its build locks when the parent ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by the doctor"))
    for name in list(os.environ):
        if name in _OF_A_JOB or name.startswith(_OF_A_JOB_PREFIXES):
            del os.environ[name]
    # Nothing here needs the network; nothing may try.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    with answers.open("a", buffering=1) as file:

        def answer(section: str, find: Callable[[], Any]) -> Any:
            try:
                found, error = find(), None
            except Exception as raised:
                found, error = None, _in_words(raised)
            file.write(json.dumps({"section": section, "found": found, "error": error}) + "\n")
            return found

        seen: dict[str, Any] = {}
        for section, find in _sections(seen).items():
            seen[section] = answer(section, find)
        from lightning_zero3.doctor.trial import train_one_step

        answer("trial", train_one_step)


def _sections(seen: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    from lightning_zero3 import build_locks, cpu_ops

    def torch() -> dict[str, Any]:
        import torch

        # As a fit does on a CPU, so that builds are looked for where it makes them.
        if not torch.cuda.is_available():
            cpu_ops.make_ninja_visible()
            cpu_ops.keep_builds_apart()
        return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}

    def of_upstream(name: str, *arguments: Any) -> Any:
        from lightning_zero3.doctor import upstream

        return getattr(upstream, name)(*arguments)

    def fixes() -> Any:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        return of_upstream("fixes", DeepSpeedZeroOptimizer_Stage3)

    def combinations() -> Any:
        from lightning_zero3.doctor.versions import packages

        return of_upstream("combinations", seen, {package.name: package.version for package in packages()})

    return {
        "torch": torch,
        "accelerator": lambda: of_upstream("accelerator"),
        "fixes": fixes,
        "limits": lambda: of_upstream("limits"),
        "ops": lambda: of_upstream("ops", build_locks.roots()),
        "combinations": combinations,
    }


def _in_words(error: BaseException) -> str:
    cause = error.__cause__
    because = f", because of {type(cause).__name__}: {cause}" if cause is not None else ""
    return f"{type(error).__name__}: {error}{because}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
