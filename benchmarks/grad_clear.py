# SPDX-License-Identifier: Apache-2.0
"""Gradient clears of the optimizer step: visits and time, ours against DeepSpeed's own, at growing sub-group counts.

    python benchmarks/grad_clear.py [--json PATH] [--chart PATH] [--also PYTHON ...]

735 parameters (GLM-4.5-Air's number) in 1, 16, 137 and 512 sub-groups. Both arms step in alternation in one process.
Then the census of two small models of the reports' architectures, with every parameter a sub-group of its own and the
clear left to DeepSpeed: how many visits find a live gradient, and what a visit costs.
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
    switches = Switches(
        scoped_grad_clear=ours,
        alias_master_weights=False,
        coalesce_grad_norms=False,
        batch_optimizer_step=False,
        coalesce_persistent_gather=False,
        skip_redundant_release=False,
        skip_invalid_norm=False,
    )
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


def language_models() -> dict[str, nn.Module]:
    """GLM-4.5-Air's and Qwen3.5-MoE's architectures at tiny widths."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    size = {"vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 8, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    glm = Glm4MoeConfig(**size, **heads, intermediate_size=64, n_routed_experts=4, attention_bias=True)
    qwen = Qwen3_5MoeTextConfig(
        **size,
        **heads,
        shared_expert_intermediate_size=16,
        num_experts=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return {"GLM-4.5-Air": Glm4MoeForCausalLM(glm), "Qwen3.5-MoE": Qwen3_5MoeForCausalLM(qwen)}


def census(model: nn.Module) -> dict[str, Any]:
    """Train a language model for a few steps with DeepSpeed's own clear, and count."""
    from lightning_zero3.config import Zero3Options
    from lightning_zero3.engine import build_training_engine
    from lightning_zero3.optimizer.switches import Switches

    engine, optimizer = build_training_engine(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "sub_group_size": 1, "reduce_bucket_size": 100_000},
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        lr_scheduler=None,
        local_rank=0,
        switches=Switches.from_options(Zero3Options(scoped_grad_clear=False, batch_optimizer_step=False)),
        target=None,
    )
    optimizer.start_grad_clear_census()
    per_visit = []
    for number in range(WARM_UP + STEPS):
        ids = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(number))
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        if number >= WARM_UP:
            per_visit.append(1e6 * optimizer.grad_clear_census.seconds / optimizer.grad_clear_census.visits)
    counted = optimizer.grad_clear_census
    result = {
        "sub_groups": len(optimizer.fp16_groups),
        "parameters": sum(map(len, optimizer.fp16_groups)),
        "visits": counted.visits,
        "live": counted.live,
        "microseconds_per_visit": statistics.median(per_visit),
    }
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
        "models": {name: census(model) for name, model in language_models().items()},
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
    print(
        f"\n{'DeepSpeed':>10}{'model':>16}{'sub-groups':>12}{'parameters':>12}{'visits':>10}{'live':>6}{'µs/visit':>10}"
    )
    for report in reports:
        for name, seen in report["models"].items():
            print(
                f"{report['versions']['deepspeed']:>10}{name:>16}{seen['sub_groups']:>12}{seen['parameters']:>12}"
                f"{seen['visits']:>10,}{seen['live']:>6}{seen['microseconds_per_visit']:>10.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps({"reports": reports}, indent=2) + "\n")
    if options.chart:
        draw(reports, options.chart)


if __name__ == "__main__":
    main()
