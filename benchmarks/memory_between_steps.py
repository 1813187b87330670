# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter between optimizer steps, ours against stock DeepSpeed, in one run.

    python benchmarks/memory_between_steps.py [--width 1024] [--layers 8] [--json PATH]

Every live tensor storage of the process is counted, less those that were alive before the engine was built; on CUDA the
allocator's figure stands beside it. One rank; what a rank holds per parameter of its own share is the same on many.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 3
# Small, so that the gradient bucket, whose size is a setting and not a share of the model, is no part of the figure.
BUCKET_ELEMENTS = 10_000
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, fp32 masters": {"bf16": {"enabled": True}},
    "bf16 masters and states": {"bf16": BF16_MASTERS},
    "autocast, fp32 weights": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


class Tower(nn.Module):
    """Linear layers whose sum of squares is the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.layers(x).float().square().mean()
        return loss


def live_storages() -> Iterator[torch.UntypedStorage]:
    """One storage for each address that some tensor of this process points into."""
    seen = set()
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor) or candidate.device.type == "meta":
            continue
        storage = candidate.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def live_bytes() -> int:
    """Bytes of all live tensor storages."""
    gc.collect()
    return sum(storage.nbytes() for storage in live_storages())


def build(ours: bool, config: dict[str, Any], model: nn.Module, device: torch.device) -> Any:
    """An engine of stock DeepSpeed, or one with our optimizer."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not ours:
        arguments = argparse.Namespace(device_rank=0)
        return deepspeed.initialize(
            args=arguments, model=model, optimizer=optimizer, config=config, dist_init_required=False
        )[0]
    from lightning_zero3.config import Zero3Options
    from lightning_zero3.engine import build_training_engine
    from lightning_zero3.optimizer.switches import Switches

    return build_training_engine(
        model,
        config=config,
        optimizer=optimizer,
        lr_scheduler=None,
        local_rank=device.index or 0,
        switches=Switches.from_options(Zero3Options()),
        target=None,
    )[0]


def measure(ours: bool, extra: dict[str, Any], width: int, layers: int, device: torch.device) -> dict[str, Any]:
    """Train for a few steps and count what is alive between two of them."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        },
        **copy.deepcopy(extra),
    }
    torch.manual_seed(0)
    before = live_bytes()
    allocated_before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    engine = build(ours, config, Tower(width, layers), device)
    dtype = torch.bfloat16 if "bf16" in extra else torch.float32
    losses = []
    for step in range(STEPS):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del batch, loss
    parameters = sum(engine.optimizer.fp16_partitioned_groups_flat_numel)
    result = {
        "parameters": parameters,
        "bytes_per_parameter": (live_bytes() - before) / parameters,
        "aliased_sub_groups": len(engine.optimizer.aliased_sub_groups()) if ours else 0,
        "losses": losses,
    }
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated() - allocated_before
        result["allocated_bytes_per_parameter"] = allocated / parameters
    engine.destroy()
    return result


def main() -> None:
    """Measure every case with both optimizers, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=1024, help="width of a layer (default 1024)")
    parser.add_argument("--layers", type=int, default=8, help="number of layers (default 8)")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed

    from lightning_zero3 import cpu_ops

    if device.type == "cpu":
        cpu_ops.prepare()
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)

    cases = []
    print(f"\n{'':26}{'stock':>10}{'ours':>10}{'saved':>10}   bytes per parameter between steps")
    for name, extra in CASES.items():
        stock, ours = (measure(arm, extra, options.width, options.layers, device) for arm in (False, True))
        saved = stock["bytes_per_parameter"] - ours["bytes_per_parameter"]
        same = stock["losses"] == ours["losses"]
        cases.append({"case": name, "stock": stock, "ours": ours, "saved": saved, "losses_identical": same})
        print(
            f"{name:26}{stock['bytes_per_parameter']:10.3f}{ours['bytes_per_parameter']:10.3f}{saved:10.3f}"
            f"   losses {'identical' if same else 'DIFFER'}"
        )
    if options.json:
        packages = ("torch", "deepspeed", "lightning")
        report = {
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
            "device": str(device),
            "cases": cases,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
