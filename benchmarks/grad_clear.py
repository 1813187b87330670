"""Gradient clears of the optimizer step: visits and time, ours against DeepSpeed's own, at growing sub-group counts.

    python benchmarks/grad_clear.py [--json PATH] [--chart PATH] [--also PYTHON ...]

735 parameters (GLM-4.5-Air's number) in 1, 16, 137 and 512 sub-groups. Both arms step in alternation in one process.
``--also .venv-oldest/bin/python`` repeats it with another environment's DeepSpeed and puts both into one report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

PARAMETERS = 735
SUB_GROUPS = (1, 16, 137, 512)
WARM_UP = 3
STEPS = 15


class Parameters(nn.Module):
    """Many small parameters in one module: what a step does with each of them is all that costs."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.full((64,), 0.01) for _ in range(PARAMETERS))

    def forward(self, scale: float) -> torch.Tensor:
        """A loss in which every parameter has a gradient."""
        return torch.stack([parameter.square().sum() for parameter in self.all]).sum() * scale


def build(ours: bool, sub_groups: int) -> Any:
    """An engine whose optimizer has as many parameter groups, and so as many sub-groups, as asked for."""
    import deepspeed
    from deepspeed.runtime.zero import stage3

    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer
    from lightning_zero3.optimizer.switches import Switches
    from lightning_zero3.substitution import substituted

    model = Parameters()
    parameters = list(model.parameters())
    bounds = [round(index * PARAMETERS / sub_groups) for index in range(sub_groups + 1)]
    groups = [{"params": parameters[first:last], "name": str(first)} for first, last in itertools.pairwise(bounds)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 0},
    }
    # The census on both arms; the clear is the only switch that differs.
    switches = Switches(scoped_grad_clear=ours, alias_master_weights=False, skip_invalid_norm=False)
    with substituted(stage3, "DeepSpeedZeroOptimizer_Stage3", FastStage3Optimizer.with_switches(switches)):
        engine, optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=0),
            model=model,
            optimizer=torch.optim.SGD(groups, lr=1e-3),
            config=config,
            dist_init_required=False,
        )
    assert len(optimizer.fp16_groups) == sub_groups
    optimizer.start_grad_clear_census()
    return engine


def measure(sub_groups: int) -> dict[str, Any]:
    """Step both arms in alternation."""
    arms = {"upstream": build(False, sub_groups), "ours": build(True, sub_groups)}
    clears: dict[str, list[float]] = {name: [] for name in arms}
    steps: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_UP + STEPS):
        for name in arms if number % 2 == 0 else reversed(arms):
            engine = arms[name]
            engine.backward(engine(1.0))
            began = time.perf_counter()
            engine.step()
            if number >= WARM_UP:
                steps[name].append(1e3 * (time.perf_counter() - began))
                clears[name].append(1e3 * engine.optimizer.grad_clear_census.seconds)
    result: dict[str, Any] = {"sub_groups": sub_groups, "parameters": PARAMETERS}
    for name, engine in arms.items():
        census = engine.optimizer.grad_clear_census
        result[name] = {
            "visits": census.visits,
            "live": census.live,
            "clear_ms": statistics.median(clears[name]),
            "step_ms": statistics.median(steps[name]),
            "microseconds_per_visit": 1e3 * statistics.median(clears[name]) / census.visits,
        }
    for engine in arms.values():
        engine.destroy()
    return result


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Visits and clear time against sub-groups, one line per release and arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    colours = {"upstream": "#D55E00", "ours": "#0072B2"}
    for report, marker in zip(reports, "os^v", strict=False):
        for arm, colour in colours.items():
            for panel, key in zip(panels, ("visits", "clear_ms"), strict=True):
                panel.plot(
                    [case["sub_groups"] for case in report["cases"]],
                    [case[arm][key] for case in report["cases"]],
                    marker=marker,
                    color=colour,
                    linestyle="--" if arm == "ours" else "-",
                    label=f"DeepSpeed {report['versions']['deepspeed']}, {'its own' if arm == 'upstream' else 'ours'}",
                )
    for panel, label in zip(panels, ("parameters visited per step", "time of the clears per step (ms)"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel="sub-groups", ylabel=label)
        panel.set_xticks(SUB_GROUPS, [str(number) for number in SUB_GROUPS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.suptitle(f"Clearing the gradients of {PARAMETERS} parameters")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run_here() -> dict[str, Any]:
    """Measure every sub-group count with this environment's DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    import deepspeed

    from lightning_zero3 import cpu_ops

    cpu_ops.prepare()
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    names = ("torch", "deepspeed")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "cases": [measure(sub_groups) for sub_groups in SUB_GROUPS],
    }


def run_elsewhere(python: str) -> dict[str, Any]:
    """The same with another environment's interpreter."""
    done = subprocess.run(
        [python, "-W", "ignore", __file__, "--raw"],
        check=True,
        capture_output=True,
        text=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def main() -> None:
    """Measure, print a table, write JSON and a chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--chart", type=Path, help="draw a PNG here")
    parser.add_argument("--also", nargs="*", default=[], help="interpreters of other environments")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    reports = [run_here()]
    if options.raw:
        sys.stdout.write("\n" + json.dumps(reports[0]) + "\n")
        return
    reports += [run_elsewhere(python) for python in options.also]
    print(
        f"\n{'DeepSpeed':>10}{'sub-groups':>12}{'visits':>18}{'live':>6}"
        f"{'clear, ms':>18}{'step, ms':>18}{'µs/visit':>18}"
    )
    print(f"{'':28}" + "its own → ours".rjust(12) + f"{'':6}" + "its own → ours".rjust(18) * 3)
    for report in reports:
        for case in report["cases"]:
            stock, ours = case["upstream"], case["ours"]
            columns = [
                f"{stock['visits']:,} → {ours['visits']:,}".rjust(18),
                f"{max(stock['live'], ours['live'])}".rjust(6),
                *(
                    f"{stock[key]:.2f} → {ours[key]:.2f}".rjust(18)
                    for key in ("clear_ms", "step_ms", "microseconds_per_visit")
                ),
            ]
            print(f"{report['versions']['deepspeed']:>10}{case['sub_groups']:>12}" + "".join(columns))
    if options.json:
        options.json.write_text(json.dumps({"reports": reports}, indent=2) + "\n")
    if options.chart:
        draw(reports, options.chart)


if __name__ == "__main__":
    main()
