# SPDX-License-Identifier: Apache-2.0
"""Starts a script's ranks, with a process group for CPUs, and prints its one line.

A script hands :func:`run` a function that returns whether the fault is there and the numbers that it saw. The script's
own process is rank 0, whose answer counts. Exit codes: 1 the fault is there, 0 it is gone, 2 it can't be told (the
reason, or the traceback, is printed). Nothing here is needed to understand a fault: :func:`zero3` and :func:`trainer`
are upstream's own calls with the settings that a CPU needs. Import it before DeepSpeed, which looks for its
accelerator when it is imported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# DeepSpeed's ops are built with the environment's ninja.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

_TAIL = 3000


class CannotTellError(Exception):
    """The installed version doesn't get as far as the fault."""


def run(check: Callable[[], tuple[bool, str]], processes: int = 1, seconds: int = 100, timeout: int = 60) -> None:
    """Call ``check`` on each of ``processes`` ranks, of which this is the first, and exit with its verdict.

    Args:
        check: Returns whether the fault is there, and what was seen.
        processes: How many ranks.
        seconds: After so many there is no answer.
        timeout: Seconds after which gloo gives up a collective.
    """
    if "UPSTREAM_RANK" in os.environ:
        _set_up(int(os.environ["UPSTREAM_RANK"]), processes, int(os.environ["MASTER_PORT"]), timeout)
        check()
        os._exit(0)
    port, others = _free_port(), []
    # Checkpoints and logs go to a folder of their own, what libraries print goes to a file.
    folder, script = tempfile.TemporaryDirectory(), str(Path(sys.argv[0]).resolve())
    os.chdir(folder.name)
    terminal, log = os.dup(1), Path(folder.name, "log.txt")
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY), stream)

    def leave(code: int, line: str, shows_log: bool = False) -> None:
        for other in others:
            other.kill()
            other.wait()
        sys.stdout.flush()
        tail = f"\n{log.read_text(errors='replace')[-_TAIL:]}" if shows_log else ""
        os.write(terminal, f"{line}{tail}\n".encode())
        folder.cleanup()
        # Past the interpreter's shutdown, which some faults hang or abort.
        os._exit(code)

    watchdog = threading.Timer(seconds, leave, (2, f"can't tell: no answer within {seconds} seconds", True))
    watchdog.daemon = True
    watchdog.start()
    for rank in range(1, processes):
        environment = {**os.environ, "UPSTREAM_RANK": str(rank), "MASTER_PORT": str(port)}
        others.append(subprocess.Popen([sys.executable, script], env=environment))
    try:
        _set_up(0, processes, port, timeout)
        present, text = check()
    except CannotTellError as reason:
        leave(2, f"can't tell: {reason}")
    except BaseException:
        traceback.print_exc()
        leave(2, "can't tell: the script failed", True)
    leave(*((1, f"FAULT PRESENT: {text}") if present else (0, f"fixed: {text}")))


def zero3(model: Any, optimizer: Any = None, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    """``deepspeed.initialize`` at stage 3, nothing persistent, nothing clipped, SGD with a rate of 0.1."""
    import deepspeed
    import torch

    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})},
            **config,
        },
    )[0]


def trainer(strategy: Any = None, **options: Any) -> Any:
    """A quiet ``lightning.pytorch.Trainer`` on one CPU, by default with stage 3."""
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    strategy = stage_3() if strategy is None else strategy
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def stage_3(*args: Any, **kwargs: Any) -> Any:
    """Lightning's ``DeepSpeedStrategy(stage=3)`` less its refusal of CPUs, and with nothing else changed."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

    return OnCPU(*args, **{"stage": 3, **kwargs})


def weight_of(parameter: Any) -> Any:
    """The whole of a partitioned parameter, as a forward would see it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _set_up(rank: int, processes: int, port: int, timeout: int) -> None:
    """As torchrun does, so that a Trainer launches nothing."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="upstream",
    )
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Imports take seconds, and not alike on all ranks; the time-out is for collectives.
    Path(f"imported{rank}").touch()
    while not all(Path(f"imported{each}").exists() for each in range(processes)):
        time.sleep(0.05)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=timeout))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
