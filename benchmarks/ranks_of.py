# SPDX-License-Identifier: Apache-2.0
"""A benchmark's own file, started again as a group of ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any


def start(file: str, ranks: int, arguments: list[str], python: str = sys.executable, limit: float | None = None) -> Any:
    """Run a group of processes and take rank 0's result: the last line that it prints, as JSON.

    Args:
        file: The benchmark, which has an option ``--worker``.
        ranks: Number of processes.
        arguments: For each of them.
        python: The interpreter.
        limit: Seconds after which they are ended; None: never.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [python, "-W", "ignore", file, "--worker", *arguments]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
    try:
        written, _ = processes[0].communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise SystemExit(f"{ranks} rank(s) took longer than {limit:g} seconds: {' '.join(arguments)}") from None
    if any(process.wait() for process in processes):
        raise SystemExit("A rank failed; see above.")
    return json.loads(written.strip().splitlines()[-1])


def answer(result: Any) -> None:
    """What a rank ends with: rank 0 prints the result for :func:`start`, all wait for it.

    Args:
        result: Anything that JSON holds.
    """
    import torch

    if os.environ["RANK"] == "0":
        print("\n" + json.dumps(result), flush=True)
    torch.distributed.barrier()
