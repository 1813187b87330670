# SPDX-License-Identifier: Apache-2.0
"""Runs the doctor's child and reads its answers; ends it when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What an ended child gets to let go of its build locks before it is killed.
_GRACE_SECONDS = 10
_LOG_LINES = 40


@dataclass
class Answers:
    """What a child has said.

    Args:
        sections: By name: what was found, or None.
        errors: By name of the section: why nothing was found.
        ended: Why there are no more sections; empty if there are all.
        log: The last lines of what it printed.
    """

    sections: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    log: list[str] = field(default_factory=list)


def ask(seconds: float) -> Answers:
    """Start the child and wait for it.

    Args:
        seconds: How long it may take altogether.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, log = Path(folder) / "answers", Path(folder) / "log"
        answers.touch()
        with log.open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_zero3.doctor.child", str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                # It finds what this process finds, and what it starts is ended with it.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
            ended = _wait(process, seconds)
        result = _read(answers)
        result.ended = ended
        if ended or result.errors:
            result.log = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return result


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for the end, or bring it about; why it ended, if it didn't end well."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it was ended after {seconds:g} s"
    finally:
        _end(process)
    if status == 0:
        return ""
    return f"it was killed by signal {-status}" if status < 0 else f"its exit status was {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it has started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(answers: Path) -> Answers:
    result = Answers()
    for line in answers.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # cut off
            answer = json.loads(line)
            result.sections[answer["section"]] = answer["found"]
            if answer["error"] is not None:
                result.errors[answer["section"]] = answer["error"]
    return result
