# SPDX-License-Identifier: Apache-2.0
"""Real gloo process groups for tests: ranks are started once per session and given functions to run.

Importing torch, DeepSpeed, Lightning and Transformers takes a rank ten seconds; a test takes a fraction of one. A
function is named by its file and its name, so any module-level function of a test file can be sent.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A rank that waits for a failed one in a collective never answers: its peers' answer comes after this many seconds.
PEER_GRACE_SECONDS = 10
TASK_TIMEOUT_SECONDS = 240
TASKS_BETWEEN_COLLECTIONS = 40
# What ranks start with: the suite's, whatever the test that starts a pool has set for itself. They outlive it.
ENVIRONMENT: dict[str, str] = {}


class RankFailure(AssertionError):
    """A function raised on at least one rank; the message holds every rank's traceback."""


class RankPool:
    """A fixed number of rank processes with a process group between them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on every rank and return the results in rank order."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, arguments))
        answers: list[Any] = []
        timeout: float = TASK_TIMEOUT_SECONDS
        for pipe in self._pipes:
            if not pipe.poll(timeout):
                answers.append(("error", "no answer (waiting for another rank, or hung)"))
                continue
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append(("error", "the process died"))
            if answers[-1][0] == "error":
                timeout = PEER_GRACE_SECONDS
        failures = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(answers) if kind == "error"]
        if failures:
            # Ranks may be stuck in a collective, and DeepSpeed's global state is unknown: start afresh.
            self.close()
            raise RankFailure("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, port, ENVIRONMENT), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(pipe: Connection, rank: int, world_size: int, port: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # As under torchrun, so that a Trainer in here launches nothing.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    import warnings

    import torch

    import lightning_zero3.cpu_ops
    import lightning_zero3.engine_end

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lightning_zero3.cpu_ops.prepare()
    import deepspeed

    from lightning_zero3.moe.tensor_parallel import forget_other_layouts

    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed collects garbage in every offload: what the imports made must not be walked each time.
    gc.collect()
    gc.freeze()
    modules: dict[str, Any] = {}
    for task in itertools.count():
        try:
            path, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if path not in modules:
                modules[path] = _load(path)
            # Nor what the tests before have left, but now and then, to get it back.
            if task % TASKS_BETWEEN_COLLECTIONS == 0:
                gc.unfreeze()
                gc.collect()
            gc.freeze()
            torch.manual_seed(0)
            # For tests of stock's strategy; ours does it itself.
            lightning_zero3.engine_end.forget_what_engines_leave({})
            forget_other_layouts(tensor_parallel_size=1)
            answer = ("value", getattr(modules[path], name)(*arguments))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)


def _load(path: str) -> Any:
    name = f"ranks_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
