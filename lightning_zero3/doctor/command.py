# SPDX-License-Identifier: Apache-2.0
"""The command: locks before anything that could wait for them, then the child, then the verdict."""

from __future__ import annotations

import json as json_format
import sys

from lightning_zero3 import build_locks
from lightning_zero3.config import SetupError
from lightning_zero3.doctor import machine, process, report, versions


def doctor(json: bool = False, timeout: float = 300.0) -> int:
    """Tell what this machine and these versions can do, and whether zero3_fast trains here.

    Needs no GPU and no network. One step is trained in a process of its own; the first on a CPU compiles an op, which
    takes about half a minute.

    Args:
        json: Print one JSON object instead of tables.
        timeout: Seconds that the imports, the checks and the training step may take together.

    Returns:
        0 if zero3_fast can train here and nothing would stop a run; 1 if not.

    Raises:
        SetupError: A time-out that isn't above 0.
    """
    if not timeout > 0:
        raise SetupError(f"--timeout {timeout:g}: a number of seconds above 0.")
    locks = build_locks.find()
    # The trial loads an op, and another run's may be the one that is locked: it would wait in vain.
    answers = None if any(lock.state == "abandoned" for lock in locks) else process.ask(timeout)
    found = report.assemble(
        versions.packages(),
        [machine.compiler(), machine.ninja(), machine.cuda_compiler()],
        machine.links(),
        locks,
        answers,
        build_locks.find(),
    )
    if json:
        print(json_format.dumps(found))
    else:
        _show(found)
    return 0 if found["can_train"] else 1


def _show(found: dict[str, object]) -> None:
    try:
        from lightning_zero3.doctor.tables import show
    except ImportError as error:
        print(f"lightning-zero3: no tables without rich ({error}); as JSON:", file=sys.stderr)
        print(json_format.dumps(found, indent=2))
        return
    show(found)
