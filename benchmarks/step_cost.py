# SPDX-License-Identifier: Apache-2.0
"""The optimizer step's host time, collectives and peak memory, ours against stock DeepSpeed's.

    python benchmarks/step_cost.py [--ranks 1 2] [--steps 50] [--json PATH] [--chart PATH] [--also PYTHON ...]
    python benchmarks/step_cost.py --device cuda --per-rank-parameters 3.3e9 [--json PATH]

GLM-4.5-Air's structure at tiny widths: 46 layers, 735 parameters, 137 sub-groups, the same parameters persistent as at
full width. Gradients come from real forward and backward passes. Stock and ours step in alternation in one process (one
per rank), and their tensors are compared at the end. ``floor`` is one call of the same optimizer over the same flat
tensors, and one all-reduce. Then one switch at a time, and 16 to 2,048 sub-groups of 2,048 parameters.

``--per-rank-parameters`` steps one rank's share of GLM-4.5-Air with its true proportions, ours alone, and compares the
time with what moving the bytes would take at the bandwidth measured in the same run.
``--also`` repeats the first part, on one rank, with another environment's DeepSpeed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = str(Path(__file__).parent)
sys.path[:0] = [HERE, str(Path(HERE).parent)]

import step_arms  # noqa: E402  (found through the line above when the file is run from anywhere)
import step_report  # noqa: E402
from ranks_of import answer, start  # noqa: E402

WARM_UP = 4
SWITCH_STEPS = 8
# Persistent at full width with DeepSpeed's threshold of 100,000: layer norms and attention biases, of at most 12,288
# elements; at these widths at most 32, and the next larger parameter has 256.
PERSISTENCE_THRESHOLD = 100
# At full width the dense parameters make two sub-groups; so do they here.
SUB_GROUP_SIZE = 150_000
GROWING = (16, 137, 512, 2048)
PARAMETERS = 2048


def alternate(engines: dict[str, Any], steps: int, floor: step_arms.Floor | None = None) -> dict[str, list[float]]:
    """Milliseconds of each step, engines in turn; the order changes every time."""
    times: dict[str, list[float]] = {name: [] for name in (*engines, "floor")}
    for number in range(WARM_UP + steps):
        for name in engines if number % 2 == 0 else reversed(engines):
            step_arms.backward(engines[name], number)
            torch.distributed.barrier()
            began = time.perf_counter()
            engines[name].step()
            times[name].append(1e3 * (time.perf_counter() - began))
        if floor is not None:
            torch.distributed.barrier()
            began = time.perf_counter()
            floor.step()
            times["floor"].append(1e3 * (time.perf_counter() - began))
    return {name: values[WARM_UP:] for name, values in times.items()}


def look_at(engines: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Collectives and peak bytes of a step, engines in turn.

    In turn, because FusedAdam's CPU kernel keeps the powers of its betas in one place per process: it multiplies them
    on where the count of steps goes up by one and computes them anew where it jumps, and the two differ in a last bit.
    """
    seen: dict[str, dict[str, int]] = {name: {} for name in engines}
    for name, engine in engines.items():
        step_arms.backward(engine, 1000)
        with step_arms.CountCollectives() as collectives:
            engine.step()
        seen[name]["collectives"] = collectives.count
    for name, engine in engines.items():
        step_arms.backward(engine, 1001)
        torch.distributed.barrier()
        with step_arms.PeakBytes() as memory:
            engine.step()
        seen[name]["peak"] = memory.peak
    return seen


def measure_glm(optimizer: str, precision: str, steps: int, with_switches: bool) -> dict[str, Any]:
    """One case: stock, ours, the floor, and each switch alone."""
    ranks = torch.distributed.get_world_size()
    zero = {
        "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
        "sub_group_size": SUB_GROUP_SIZE // ranks,
    }

    def build(chosen: Any) -> Any:
        return step_arms.build(step_arms.tiny_glm(), chosen, optimizer=optimizer, precision=precision, zero=zero)

    engines = {"stock": build(None), "ours": build(step_arms.switches())}
    sub_groups = len(engines["ours"].optimizer.fp16_groups)
    assert sub_groups == 137, sub_groups
    times = alternate(engines, steps, step_arms.Floor(engines["ours"]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    seen = look_at(engines)
    ours = engines["ours"].optimizer
    case = {
        "model": "GLM-4.5-Air, tiny",
        "ranks": ranks,
        "optimizer": optimizer,
        "precision": precision,
        "sub_groups": sub_groups,
        "parameters": sum(map(len, ours.fp16_groups)),
        "persistent": len(ours.persistent_parameters),
        "steps": steps,
        "stock_ms": medians["stock"],
        "ours_ms": medians["ours"],
        "ratio": medians["ours"] / medians["stock"],
        "floor_ms": medians["floor"],
        "ours_over_floor": medians["ours"] / medians["floor"],
        "collectives_stock": seen["stock"]["collectives"],
        "collectives_ours": seen["ours"]["collectives"],
        "peak_bytes_stock": seen["stock"]["peak"],
        "peak_bytes_ours": seen["ours"]["peak"],
        "optimizer_calls_ours": ours.optimizer_calls,
        "chunks_ours": ours.step_chunks,
        "same_bits": step_arms.same_bits(engines["stock"], engines["ours"]),
        "switches": {},
    }
    if with_switches:
        engines.pop("ours").destroy()
        for name in step_arms.SWITCHES:
            engines[name] = build(step_arms.switches(**{name: True}))
        alone = {name: statistics.median(values) for name, values in alternate(engines, SWITCH_STEPS).items() if values}
        case["switches"] = {name: alone[name] / alone["stock"] for name in step_arms.SWITCHES}
    for engine in engines.values():
        engine.destroy()
    return case


def measure_growing(sub_groups: int, optimizer: str, steps: int) -> dict[str, Any]:
    """The same parameters in more and more sub-groups."""
    zero = {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": -(-PARAMETERS // sub_groups) * 64,
    }
    engines = {
        name: step_arms.build(
            step_arms.ManyParameters([64] * PARAMETERS), chosen, optimizer=optimizer, precision="fp32", zero=zero
        )
        for name, chosen in (("stock", None), ("ours", step_arms.switches()))
    }
    found = len(engines["ours"].optimizer.fp16_groups)
    times = alternate(engines, steps, step_arms.Floor(engines["ours"]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    seen = look_at(engines)
    case = {
        "model": f"{PARAMETERS} parameters",
        "ranks": torch.distributed.get_world_size(),
        "optimizer": optimizer,
        "precision": "fp32",
        "sub_groups": found,
        "parameters": PARAMETERS,
        "steps": steps,
        "stock_ms": medians["stock"],
        "ours_ms": medians["ours"],
        "ratio": medians["ours"] / medians["stock"],
        "floor_ms": medians["floor"],
        "collectives_stock": seen["stock"]["collectives"],
        "collectives_ours": seen["ours"]["collectives"],
        "peak_bytes_stock": seen["stock"]["peak"],
        "peak_bytes_ours": seen["ours"]["peak"],
        "same_bits": step_arms.same_bits(engines["stock"], engines["ours"]),
    }
    for engine in engines.values():
        engine.destroy()
    return case


def glm_shares(parameters: float) -> list[int]:
    """Sizes of GLM-4.5-Air's 735 partitions where one rank holds that many parameters in all, true proportions."""
    hidden, heads, experts, expert, vocabulary = 4096, 96 * 128, 128, 1408, 151_552
    attention = [heads * hidden, 8 * 128 * hidden, 8 * 128 * hidden, heads, 8 * 128, 8 * 128, heads * hidden]
    sizes = [vocabulary * hidden]
    for layer in range(step_arms.LAYERS):
        sizes += [*attention, hidden, hidden]
        wide = 10_944 if layer == 0 else expert
        sizes += [wide * hidden] * 3
        if layer:
            sizes += [experts * hidden, *[experts * expert * hidden] * 3]
    sizes += [hidden, vocabulary * hidden]
    return [max(1, round(size * parameters / sum(sizes))) for size in sizes]


def measure_share(parameters: float, device: str, steps: int) -> dict[str, Any]:
    """One rank's share of the true model: our step against the time that moving its bytes takes."""
    sizes = glm_shares(parameters)
    model = step_arms.ManyParameters(sizes, device, torch.bfloat16)
    # DeepSpeed's default bucket at the true size, in proportion below it.
    bucket = max(2 * max(sizes), round(5e8 * min(1.0, parameters / 3.3e9)))
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket}
    # As at full width: every expert tensor is a sub-group, the dense parameters are two.
    zero["sub_group_size"] = max(sizes)
    engine = step_arms.build(
        model, step_arms.switches(), optimizer="FusedAdam", precision="bf16", zero=zero, device=device
    )
    stage3 = engine.optimizer
    step_arms.backward(engine, 0)
    engine.step()
    times = []
    for _ in range(2 + steps):
        stage3.grad_partitions_flat_buffer.normal_()
        stage3.independent_gradient_partition_epilogue()
        _synchronize(device)
        began = time.perf_counter()
        stage3.step()
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    # Per parameter: the gradient for the norm and for the update, master and two moments in and out, the weight.
    moved = sum(sizes) * (2 + 2 + 2 * (4 + 4 + 4) + 2)
    bandwidth = _bandwidth(device, min(sum(sizes) * 4, 2 << 30))
    return {
        "device": device,
        "parameters": sum(sizes),
        "sub_groups": len(stage3.fp16_groups),
        "chunks": stage3.step_chunks,
        "step_ms": statistics.median(times[2:]),
        "bytes_moved": moved,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "floor_ms": 1e3 * moved / bandwidth,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def _bandwidth(device: str, size: int) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        _synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() * 4 / best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def join_group(device: str) -> None:
    """Make this process a rank."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(1)
    import deepspeed

    from lightning_zero3 import cpu_ops

    if device == "cpu":
        cpu_ops.prepare()
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", verbose=False)


def work(options: Any) -> dict[str, Any]:
    """What one process of a group does; all return the same."""
    join_group(options.device)
    if options.per_rank_parameters:
        return {"share": measure_share(options.per_rank_parameters, options.device, options.steps)}
    cases = [
        measure_glm(optimizer, precision, options.steps, options.switches)
        for precision in options.precision
        for optimizer in options.optimizers
    ]
    growing = []
    if options.growing:
        growing = [measure_growing(sub_groups, "FusedAdam", 20) for sub_groups in GROWING]
    return {"cases": cases + growing}


def versions() -> dict[str, str]:
    """What was measured with."""
    names = ("torch", "deepspeed", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def keep(report: dict[str, Any], path: str | None) -> None:
    """Write what there is so far: a whole run takes a quarter of an hour and more."""
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Measure, print a table, write JSON and a chart."""
    parser = step_arms.parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, *([4] if (os.cpu_count() or 1) >= 4 else [])])
    parser.add_argument("--steps", type=int, default=50, help="steps of stock and ours each, after warm-up")
    parser.add_argument("--optimizers", nargs="*", default=list(step_arms.OPTIMIZERS))
    parser.add_argument("--precision", nargs="*", default=["bf16"], choices=list(step_arms.PRECISIONS))
    parser.add_argument("--no-switches", dest="switches", action="store_false", help="without each switch alone")
    parser.add_argument("--no-growing", dest="growing", action="store_false", help="without 16 to 2,048 sub-groups")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--per-rank-parameters", type=float, help="step one rank's share of the true model instead")
    parser.add_argument("--worker", action="store_true", help="internal")
    options = parser.parse_args()
    if options.worker:
        answer(work(options))
        return
    common = ["--device", options.device, "--steps", str(options.steps)]
    if options.per_rank_parameters:
        share = start(__file__, 1, [*common, "--per-rank-parameters", str(options.per_rank_parameters)])
        report = {"versions": versions(), **share}
        print(json.dumps(report, indent=2))
    else:
        common += ["--optimizers", *options.optimizers, "--precision", *options.precision]
        quick = [] if options.switches else ["--no-switches"]
        report = {"versions": versions(), "cases": [], "also": []}
        for ranks in options.ranks:
            growing = options.growing and ranks == options.ranks[0]
            report["cases"] += start(__file__, ranks, common + quick + [*([] if growing else ["--no-growing"])])[
                "cases"
            ]
            keep(report, options.json)
        for python in options.also:
            code = "from importlib.metadata import version; print(version('deepspeed'))"
            other = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
            cases = start(__file__, 1, [*common, "--no-switches", "--no-growing"], python)["cases"]
            report["also"].append({"versions": {**versions(), "deepspeed": other}, "cases": cases})
        step_report.print_table(report)
        if options.chart:
            step_report.draw(report, Path(options.chart))
    keep(report, options.json)


if __name__ == "__main__":
    main()
