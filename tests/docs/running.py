# SPDX-License-Identifier: Apache-2.0
"""Running blocks: Python in a process that has imported everything, commands by bash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.docs.blocks import ROOT, Block

# A rank of the tests has them as under torchrun; a reader's process hasn't.
SET_BY_A_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
COMMANDS_TIMEOUT_SECONDS = 900


def like_the_repository(folder: Path) -> Path:
    """Fill a folder with links to what is in the repository, but for what its programs write."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("runs", "build", "dist"):
            (folder / entry.name).symlink_to(entry)
    return folder


def write_files(blocks: Iterable[Block], folder: Path) -> None:
    """Write the blocks that begin with a file's name to that file."""
    for block in blocks:
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.source)):
            (folder / name[1]).write_text(block.source)


def run_python(blocks: list[Block], folder: str) -> None:
    """Run a page's Python on this rank, as a reader's process would.

    Args:
        blocks: In the page's order.
        folder: The current one meanwhile.
    """
    environment, there = dict(os.environ), os.getcwd()
    for name in SET_BY_A_LAUNCHER:
        os.environ.pop(name, None)
    namespace = {"__name__": "__main__"}
    try:
        os.chdir(folder)
        for block in blocks:
            # Lines are counted as the page's own, for tracebacks.
            exec(compile("\n" * block.line + block.source, str(ROOT / block.page), "exec"), namespace)
    finally:
        os.chdir(there)
        os.environ.clear()
        os.environ.update(environment)


def run_commands(block: Block, folder: Path) -> None:
    """Run a block's lines by bash, as a reader would in a clone.

    Args:
        block: One of bash.
        folder: One that looks like the repository.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    command = ["bash", "-euo", "pipefail", "-c", block.source]
    options = {"cwd": folder, "env": environment, "text": True, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        try:
            printed, _ = process.communicate(timeout=COMMANDS_TIMEOUT_SECONDS)
        except BaseException:  # a time-out of pytest's, too
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, f"{block.place}: {process.returncode}\n{printed[-4000:]}"
