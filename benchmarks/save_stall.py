# SPDX-License-Identifier: Apache-2.0
"""How long training stands still for a checkpoint: DeepSpeed's own save, ours at once, ours in the background.

    python benchmarks/save_stall.py [--ranks 1 2] [--width 1024] [--layers 24] [--saves 5] [--folder DIR] [--json PATH]

A tower of linear layers with AdamW in fp32, 12 bytes per parameter in a checkpoint. Each arm saves to one path over and
over, training in between, until what is in the background is committed. The stall is what the save takes, and for the
background what it takes to ask whether all ranks are done, and to commit. Figures are the slowest rank's, medians over
saves; a step's time beside a save in the background stands next to an undisturbed one's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import memory_between_steps  # noqa: E402  (found through the line above when the file is run from anywhere)

WARM_UP = 3
ARMS = ("DeepSpeed", "at once", "in the background")


def step(engine: Any, width: int, device: torch.device) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    loss = engine(torch.ones(4, width, device=device))
    engine.backward(loss)
    engine.step()
    loss.item()
    return time.perf_counter() - began


def timed(function: Any, *arguments: Any, **named: Any) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    function(*arguments, **named)
    return time.perf_counter() - began


def slowest(seconds: float) -> float:
    """The slowest rank's."""
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def measure(arm: str, engine: Any, path: Path, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One arm's medians."""
    from lightning_zero3.checkpoints import manifest
    from lightning_zero3.checkpoints.saver import Request, Saver

    saver = Saver()
    request = Request(path=path, client_state={}, layout={"ranks": dist.get_world_size()})
    stalls, wholes, beside, alone = [], [], [], []
    for _ in range(options.saves + 1):
        alone += [step(engine, options.width, device) for _ in range(WARM_UP)]
        dist.barrier()
        began = time.perf_counter()
        if arm == "DeepSpeed":
            stall = timed(engine.save_checkpoint, str(path), tag="checkpoint")
        else:
            stall = timed(saver.save, engine, request, background=arm == "in the background")
        while saver.pending is not None:
            beside.append(step(engine, options.width, device))
            stall += timed(saver.poll)
        wholes.append(slowest(time.perf_counter() - began))
        stalls.append(slowest(stall))
    saver.close()
    if arm != "DeepSpeed":
        assert manifest.verify(path)
    result = {
        "arm": arm,
        # The first save builds what later ones find.
        "stall_seconds": statistics.median(stalls[1:]),
        "stalls": stalls,
        "until_committed_seconds": statistics.median(wholes[1:]),
        "step_seconds": slowest(statistics.median(alone)),
        "step_beside_seconds": slowest(statistics.median(beside)) if beside else None,
    }
    return result


def work(rank: int, ranks: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """All arms on one rank."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    import deepspeed

    from lightning_zero3 import cpu_ops

    if device.type == "cpu":
        cpu_ops.prepare()
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = memory_between_steps.Tower(options.width, options.layers)
    parameters = sum(p.numel() for p in model.parameters())
    engine = memory_between_steps.build(True, config, model, device)
    arms = [measure(arm, engine, Path(folder, f"{arm}.ckpt"), options, device) for arm in ARMS]
    files = [path for path in Path(folder, "at once.ckpt").rglob("*.pt") if f"_rank_{rank}_" in path.name]
    written = sum(path.stat().st_size for path in files)
    if rank == 0:
        result = {"ranks": ranks, "parameters": parameters, "bytes_of_rank_0": written, "arms": arms}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure on each number of ranks, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--width", type=int, default=1024, help="width of a layer (default 1024)")
    parser.add_argument("--layers", type=int, default=24, help="number of layers (default 24)")
    parser.add_argument("--saves", type=int, default=5, help="saves of each arm, after a first one (default 5)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    packages = ("torch", "deepspeed", "lightning")
    cases = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            spawn(work, (ranks, port, folder, options), nprocs=ranks)
            cases.append(json.loads(Path(folder, "result.json").read_text()))
        case = cases[-1]
        size = case["bytes_of_rank_0"] / 1e6
        print(f"\n{ranks} rank{'s' * (ranks > 1)}, {case['parameters']:,} parameters, {size:,.0f} MB per rank")
        print(f"{'':20}{'stall':>10}{'until committed':>18}{'a step beside it':>20}{'a step':>10}   seconds")
        for arm in case["arms"]:
            beside = "" if arm["step_beside_seconds"] is None else f"{arm['step_beside_seconds']:.3f}"
            print(
                f"{arm['arm']:20}{arm['stall_seconds']:10.3f}{arm['until_committed_seconds']:18.3f}{beside:>20}"
                f"{arm['step_seconds']:10.3f}"
            )
    if options.json:
        versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
        options.json.write_text(json.dumps({"versions": versions, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
