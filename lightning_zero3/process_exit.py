# SPDX-License-Identifier: Apache-2.0
"""Leaving a process group at the end of a process, so that a finished run exits with 0.

Upstream symbol: ``ProcessGroupGloo::runLoop`` (torch 2.8 to 2.13). Its threads let go of a collective's tensors some
time after the collective has finished, and need Python's lock for it. One that asks for the lock while the interpreter
shuts down is ended by Python inside a C++ function that may not be left that way, and the process aborts ("terminate
called without an active exception", exit code -6): a scheduler then takes a finished job for a failed one. Destroying
the group doesn't wait for them as long as anybody, DeepSpeed for one, holds the group. Expires when torch's threads
don't touch Python objects, or with Python 3.14, which parks such threads instead.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

import torch

_THREAD_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_LOOK_EVERY_SECONDS = 0.005
_GIVE_UP_AFTER_SECONDS = 2.0
# Where threads can't be looked at. A thread that is ready to run waits less long than this for its turn.
_BLIND_WAIT_SECONDS = 0.25


def leave_process_group_at_exit() -> None:
    """Destroy the default process group when the interpreter exits, and see gloo's threads off.

    Lightning does the first for its own groups with NCCL; DeepSpeed never does.
    """
    # Several fits in one process need it once.
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    wait_for_gloo_threads()


def wait_for_gloo_threads() -> None:
    """Give up Python's lock until none of gloo's threads has anything left to do.

    A thread that waits for the lock gets it, or is ready to run, while this one sleeps. So threads that are asleep at
    three looks in a row want nothing.
    """
    if not _TASKS.is_dir():
        time.sleep(_BLIND_WAIT_SECONDS)
        return
    deadline = time.monotonic() + _GIVE_UP_AFTER_SECONDS
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        states = _states_of_gloo_threads()
        if not states:
            return
        quiet = quiet + 1 if all(state == "S" for state in states) else 0
        time.sleep(_LOOK_EVERY_SECONDS)


def _states_of_gloo_threads() -> list[str]:
    """The kernel's letter for what each thread of gloo's is doing: R runs, S sleeps."""
    states = []
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == _THREAD_NAME:
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
