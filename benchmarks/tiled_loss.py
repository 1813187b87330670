# SPDX-License-Identifier: Apache-2.0
"""Logits and loss in tiles against the whole: peak memory and time of forward and backward at growing sequence length.

    python benchmarks/tiled_loss.py [--tiles 16] [--vocabulary 32000] [--width 256] [--json PATH]

One process, one sample of bf16 hidden states, an ``lm_head``, no engine. Memory is what lived at once in tensor
storages beyond what was there before (weight and hidden states); times are medians, both arms in alternation. The
difference of the gradients stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
LENGTHS = (1024, 2048, 4096, 8192)
REPEATS = 3


class Head(nn.Module):
    """The part of a language model that is measured."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)


def loss_of(head: Any, hidden: torch.Tensor, labels: torch.Tensor, tiled: bool) -> torch.Tensor:
    """As Transformers computes it, or in tiles."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = head(hidden, labels) if tiled else ForCausalLMLoss(head(hidden), labels, head.weight.shape[0])
    return loss


def measure(head: Any, length: int) -> dict[str, Any]:
    """Both arms at one sequence length."""
    from step_arms import PeakBytes

    device = head.weight.device
    generator = torch.Generator().manual_seed(length)
    hidden: Any = torch.randn(1, length, head.weight.shape[1], generator=generator).to(device, torch.bfloat16)
    hidden.requires_grad_()
    labels = torch.randint(0, head.weight.shape[0], (1, length), generator=generator).to(device)
    found: dict[bool, dict[str, Any]] = {False: {"ms": []}, True: {"ms": []}}
    for repeat in range(REPEATS + 1):  # the first is for memory
        for tiled, seen in found.items():
            head.weight.grad = hidden.grad = None
            start = time.perf_counter()
            if repeat == 0:
                with PeakBytes() as counted:
                    loss = loss_of(head, hidden, labels, tiled)
                    loss.backward()
                seen["peak"] = counted.peak
            else:
                loss = loss_of(head, hidden, labels, tiled)
                loss.backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seen["ms"].append((time.perf_counter() - start) * 1000)
            seen.update(loss=loss.item(), gradients=(head.weight.grad.float(), hidden.grad.float()))
    plain, tiles = found[False], found[True]
    differences = [
        ((ours - theirs).norm() / theirs.norm()).item()
        for ours, theirs in zip(tiles["gradients"], plain["gradients"], strict=True)
    ]
    return {
        "length": length,
        "plain_mib": plain["peak"] / 2**20,
        "tiled_mib": tiles["peak"] / 2**20,
        "plain_ms": statistics.median(plain["ms"]),
        "tiled_ms": statistics.median(tiles["ms"]),
        "loss_difference": abs(plain["loss"] - tiles["loss"]),
        "weight_gradient_difference": differences[0],
        "hidden_gradient_difference": differences[1],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    from shared.tiled_loss import tile_head

    torch.manual_seed(0)
    model = Head(options.width, options.vocabulary).to("cuda" if torch.cuda.is_available() else "cpu")
    tile_head(model, options.tiles)
    rows = [measure(model.lm_head, length) for length in options.lengths]
    print(f"{'tokens':>7} {'plain MiB':>10} {'tiled MiB':>10} {'plain ms':>9} {'tiled ms':>9}  gradients differ by")
    for row in rows:
        print(
            f"{row['length']:>7} {row['plain_mib']:>10.1f} {row['tiled_mib']:>10.1f} {row['plain_ms']:>9.0f} "
            f"{row['tiled_ms']:>9.0f}  {row['weight_gradient_difference']:.1e} (weight), "
            f"{row['hidden_gradient_difference']:.1e} (hidden)"
        )
    if options.json:
        about = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, **about, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
