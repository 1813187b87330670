"""A micro-step's host time, ours against stock DeepSpeed's, and beside them the plain model's.

    python benchmarks/micro_step_cost.py [--ranks 1 2] [--steps 10] [--json PATH] [--device cpu|cuda]

GLM-4.5-Air's structure at tiny widths (46 layers, 735 parameters) with expert parallelism, and a dense Llama of as many
layers; with and without recomputation of activations. Stock, ours and ours without one switch at a time take forward,
backward and step in alternation, in one process per rank, on the same data. ``plain`` is the model without DeepSpeed,
on rank 0's data. Counted in one micro-step of each: collectives in forward, backward and step, inspected signatures,
NVTX ranges, and processes started to count devices.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = str(Path(__file__).parent)
sys.path[:0] = [HERE, str(Path(HERE).parent)]

import step_arms  # noqa: E402  (found through the line above when the file is run from anywhere)
import step_cost  # noqa: E402
from ranks_of import answer, start  # noqa: E402

WARM_UP = 4
SWITCHES = ("bucket_per_process_group", "lean_hooks", "lean_linear")
PHASES = ("forward", "backward", "step")
ZERO = {
    "stage3_param_persistence_threshold": step_cost.PERSISTENCE_THRESHOLD,
    "sub_group_size": step_cost.SUB_GROUP_SIZE,
    # DeepSpeed's own, in which all gradients fit.
    "reduce_bucket_size": 1_000_000,
}


def dense() -> torch.nn.Module:
    """A Llama as deep as GLM-4.5-Air, at tiny widths."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=step_arms.VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=step_arms.LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model


MODELS = {"GLM-4.5-Air, tiny": step_arms.tiny_glm, "Llama, tiny": dense}


def batch(number: int, tokens: int, device: str) -> torch.Tensor:
    """Other tokens on every rank and step."""
    generator = torch.Generator().manual_seed(97 * number + torch.distributed.get_rank())
    return torch.randint(0, step_arms.VOCABULARY, (step_arms.BATCH, tokens), generator=generator).to(device)


class Plain:
    """The model without DeepSpeed, with an engine's three calls."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.module = model.to(device, torch.bfloat16)

    def __call__(self, **inputs: Any) -> Any:
        """Forward."""
        return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, and nothing around it."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """No optimizer: it is forward and backward that are compared."""
        self.module.zero_grad()


def micro_step(engine: Any, ids: torch.Tensor, device: str) -> tuple[list[float], float]:
    """Milliseconds of forward, backward and step, and the loss."""
    times = []
    step_cost._synchronize(device)
    began = time.perf_counter()
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    for call in (lambda: engine.backward(loss), engine.step, None):
        step_cost._synchronize(device)
        now = time.perf_counter()
        times.append(1e3 * (now - began))
        began = now
        if call is not None:
            call()
    return times, loss.item()


def counts(engine: Any, ids: torch.Tensor) -> dict[str, int]:
    """What one micro-step launches and calls."""
    from deepspeed.accelerator import get_accelerator

    from lightning_zero3.substitution import substituted

    seen = dict.fromkeys(("signatures", "device counts", "NVTX ranges"), 0)
    accelerator = get_accelerator()

    def counting(name: str, function: Any) -> Any:
        def count(*arguments: Any, **named: Any) -> Any:
            seen[name] += 1
            return function(*arguments, **named)

        return count

    with contextlib.ExitStack() as stack:
        for name, owner, attribute in (
            ("signatures", inspect, "signature"),
            ("device counts", accelerator, "device_count"),
            ("NVTX ranges", accelerator, "range_push"),
        ):
            stack.enter_context(substituted(owner, attribute, counting(name, getattr(owner, attribute))))
        with step_arms.CountCollectives() as collectives:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            forward = collectives.count
            engine.backward(loss)
            backward = collectives.count
            engine.step()
    named = {"forward": forward, "backward": backward - forward, "step": collectives.count - backward}
    return {**{f"collectives in {phase}": count for phase, count in named.items()}, **seen}


def measure(model: str, *, recompute: bool, tokens: int, steps: int, device: str) -> dict[str, Any]:
    """One case: stock, ours, ours less one switch, and the plain model."""
    from lightning_zero3.optimizer.switches import Switches

    arms: dict[str, Any] = {"stock": None, "ours": Switches()}
    arms |= {f"without {name}": Switches(**{name: False}) for name in SWITCHES}

    def made() -> torch.nn.Module:
        built: Any = MODELS[model]()
        if recompute:
            built.gradient_checkpointing_enable({"use_reentrant": False})
        built.train()
        return built  # type: ignore[no-any-return]

    engines: dict[str, Any] = {
        name: step_arms.build(made(), chosen, optimizer="FusedAdam", precision="bf16", zero=ZERO, device=device)
        for name, chosen in arms.items()
    }
    engines["plain"] = Plain(made(), device)
    times: dict[str, list[list[float]]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(WARM_UP + steps):
        ids = batch(number, tokens, device)
        for name in engines if number % 2 == 0 else reversed(engines):
            torch.distributed.barrier()
            taken, loss = micro_step(engines[name], ids, device)
            times[name].append(taken)
            losses[name].append(loss)
    medians = {
        name: dict(zip(PHASES, map(statistics.median, zip(*every[WARM_UP:], strict=True)), strict=True))
        for name, every in times.items()
    }

    def micro(name: str) -> float:
        return float(medians[name]["forward"] + medians[name]["backward"])

    over = {name: micro(name) - micro("plain") for name in arms}
    case = {
        "model": model,
        "ranks": torch.distributed.get_world_size(),
        "recompute": recompute,
        "tokens": tokens,
        "steps": steps,
        "medians_ms": medians,
        "overhead_over_plain": {name: value / over["stock"] for name, value in over.items() if name != "stock"},
        "whole_step": sum(medians["ours"].values()) / sum(medians["stock"].values()),
        "counts": {name: counts(engines[name], batch(1000, tokens, device)) for name in ("stock", "ours")},
        "same_bits": losses["ours"] == losses["stock"] and step_arms.same_bits(engines["stock"], engines["ours"]),
    }
    for name in arms:
        engines[name].destroy()
    return case


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one process of a group does; all return the same."""
    step_cost.join_group(options.device)
    return [
        measure(model, recompute=recompute, tokens=tokens, steps=options.steps, device=options.device)
        for model in MODELS
        for recompute in (False, True)
        for tokens in options.tokens
    ]


def show(case: dict[str, Any]) -> None:
    """A case in a few lines."""
    print(
        f"\n{case['model']}, {case['ranks']} rank(s), {case['tokens']} tokens"
        f"{', recomputed' if case['recompute'] else ''}: whole step {case['whole_step']:.3f} of stock's; "
        f"{'same bits' if case['same_bits'] else 'OTHER BITS'}"
    )
    for name, phases in case["medians_ms"].items():
        share = case["overhead_over_plain"].get(name)
        beside = "" if share is None else f"  overhead over plain {share:.3f} of stock's"
        print(f"  {name:34}", "  ".join(f"{phase} {phases[phase]:7.1f}" for phase in PHASES), "ms", beside)
    for name, seen in case["counts"].items():
        print(f"  {name:34}", ", ".join(f"{what} {count}" for what, count in seen.items()))


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=10, help="micro-steps of each arm, after warm-up")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16], help="of one micro-batch")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--worker", action="store_true", help="internal")
    options = parser.parse_args()
    if options.worker:
        answer(work(options))
        return
    arguments = ["--device", options.device, "--steps", str(options.steps), "--tokens", *map(str, options.tokens)]
    report: dict[str, Any] = {"versions": step_cost.versions(), "cases": []}
    for ranks in options.ranks:
        for case in start(__file__, ranks, arguments):
            show(case)
            report["cases"].append(case)
        step_cost.keep(report, options.json)


if __name__ == "__main__":
    main()
