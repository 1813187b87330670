# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into ZeRO partitions: ours against Transformers' own path. Peak memory, time and bytes read, per rank.

    python benchmarks/load_weights.py [--ranks 1 2] [--width 384] [--layers 18] [--experts 16] [--json PATH]

A GLM-4.5 of the given sizes is saved in bf16, in shards, each expert apart as the published checkpoints have them. Then
it is loaded under ``zero.Init`` in fresh processes: by ``from_pretrained`` with a live ``HfDeepSpeedConfig``, and by
``build_from_config(weights=...)``. Both end with the same partitions, which is checked. Memory is the kernel's
high-water mark of resident pages beyond those before, with what was freed given back at once; tensors are the most
bytes of tensor storages that lived at once, mapped files included. Bytes read are, for ours, what the reader counts;
for ``from_pretrained``, which maps files and keeps them mapped, the pages of files that became resident.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = str(Path(__file__).parent)
sys.path[:0] = [HERE, str(Path(HERE).parent)]

import step_arms  # noqa: E402  (found through the line above when the file is run from anywhere)
from ranks_of import start  # noqa: E402

ARMS = ("from_pretrained", "ours")
MIB = 1 << 20
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def config_of(width: int, layers: int, experts: int) -> Any:
    """A GLM-4.5 with one dense layer."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        first_k_dense_replace=1,
        vocab_size=32 * width,
        num_nextn_predict_layers=0,
    )


def resident(name: str) -> int:
    """One of the kernel's counts of this process's pages, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The most resident memory, the most of it that is pages of files, and the time."""
    import ctypes
    import gc

    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 18)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, files_before = resident("VmRSS"), resident("RssFile")
    seen: dict[str, float] = {"files_mib": 0.0}
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            seen["files_mib"] = max(seen["files_mib"], (resident("RssFile") - files_before) / MIB)

    thread = threading.Thread(target=sample)
    thread.start()
    began = time.perf_counter()
    yield seen
    seen["seconds"] = time.perf_counter() - began
    seen["resident_mib"] = (resident("VmHWM") - before) / MIB
    stop.set()
    thread.join()


def load(arm: str, folder: str) -> Any:
    """One way to a partitioned model."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if arm == "from_pretrained":
        alive = HfDeepSpeedConfig(CONFIG)
        model = Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        del alive
        return model
    from lightning_zero3.moe.build import build_from_config
    from lightning_zero3.moe.sharded_build import sharded_build

    with sharded_build(CONFIG):
        return build_from_config(Glm4MoeForCausalLM, Glm4MoeConfig.from_pretrained(folder), folder)


def counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the bytes that our reader has read meanwhile."""
    from lightning_zero3.moe.safetensors_files import WeightFiles

    made: list[WeightFiles] = []
    original = WeightFiles.__init__

    def remember(files: WeightFiles, folder: Any) -> None:
        original(files, folder)
        made.append(files)

    WeightFiles.__init__ = remember  # type: ignore[method-assign, assignment]
    result = run()
    WeightFiles.__init__ = original  # type: ignore[method-assign]
    return result, sum(files.bytes_read for files in made)


def work(options: argparse.Namespace) -> None:
    """Load once for memory and time, once more for live tensors; print one line of JSON on rank 0."""
    import deepspeed

    import lightning_zero3.cpu_ops

    torch.set_num_threads(1)
    lightning_zero3.cpu_ops.prepare()
    deepspeed.init_distributed("gloo", verbose=False)
    # What a process loads and allocates once isn't what a checkpoint takes.
    load(options.arm, f"{options.folder}/small")
    torch.distributed.barrier()
    with watched() as seen:
        model, read = counted(lambda: load(options.arm, options.folder))
    seen["read_mib"] = (read / MIB) if options.arm == "ours" else seen["files_mib"]
    parameters: list[Any] = list(model.parameters())
    seen["share_mib"] = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in parameters) / MIB
    # Padding of the last rank's partitions is nobody's.
    rank, check = torch.distributed.get_rank(), 0
    for parameter in parameters:
        size = parameter.ds_tensor.numel()
        real = max(0, min(size, parameter.ds_numel - rank * size))
        bits = parameter.ds_tensor.view(torch.int16)[:real].long()
        check = (31 * check + int((bits * torch.arange(1, real + 1)).sum())) % (1 << 61)
    seen["check"] = check
    del model, parameters
    with step_arms.PeakBytes() as peak:
        load(options.arm, options.folder)
    seen["tensors_mib"] = peak.peak / MIB
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, seen)
    if rank == 0:
        print(json.dumps(everyone), flush=True)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if options.worker:
        work(options)
        return
    versions = {name: version(name) for name in ("torch", "deepspeed", "transformers", "safetensors")}
    report: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), **versions, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        from transformers import Glm4MoeForCausalLM

        torch.manual_seed(0)
        for path, sizes in (
            (folder, (options.width, options.layers, options.experts)),
            (f"{folder}/small", (16, 2, 4)),
        ):
            Glm4MoeForCausalLM(config_of(*sizes)).to(torch.bfloat16).save_pretrained(path, max_shard_size="100MB")
        report["stored_mib"] = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / MIB
        print(f"{report['stored_mib']:,.0f} MiB of bf16 in files; per rank, MiB")
        print(
            f"{'ranks':>5} {'rank':>4} {'':16} {'share':>8} {'read':>8} {'tensors':>8} {'resident':>9} {'seconds':>8}"
        )
        for ranks in options.ranks:
            checks = {}
            for arm in ARMS:
                seen = start(__file__, ranks, ["--arm", arm, "--folder", folder])
                checks[arm] = [each.pop("check") for each in seen]
                report["cases"] += [{"ranks": ranks, "rank": rank, "arm": arm, **s} for rank, s in enumerate(seen)]
                for rank, each in enumerate(seen):
                    numbers = (each[f"{name}_mib"] for name in ("share", "read", "tensors", "resident"))
                    shown = "{:8,.0f} {:8,.0f} {:8,.0f} {:9,.0f}".format(*numbers)
                    print(f"{ranks:5} {rank:4} {arm:16} {shown} {each['seconds']:8.2f}", flush=True)
            if checks["ours"] != checks["from_pretrained"]:
                raise SystemExit("The two ways give other partitions.")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
