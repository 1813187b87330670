# SPDX-License-Identifier: Apache-2.0
"""A micro-step's host time, ours against stock DeepSpeed's, and beside them the plain model's.

    python benchmarks/micro_step_cost.py [--ranks 1 2] [--steps 10] [--json PATH] [--device cpu|cuda]
        [--cases glm dense glm-recomputed dense-recomputed] [--arms stock ours] [--limit SECONDS]

GLM-4.5-Air's structure at tiny widths (46 layers, 735 parameters) with expert parallelism, and a dense Llama of as many
layers; with and without recomputation of activations. Stock, ours and ours without one switch at a time take forward,
backward and step in alternation, in one process per rank, on the same data. ``plain`` is the model without DeepSpeed,
on rank 0's data. Counted in one micro-step of each: collectives in forward, backward and step, inspected signatures,
NVTX ranges, processes started to count devices, and calls of Python's and C's functions in rank 0's thread. Times are
the wall clock's, and beside them those of rank 0's thread alone, which other programs on the machine disturb less.
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

# Before DeepSpeed puts its own there, for the whole process.
LINEAR = torch.nn.functional.linear
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
CASES = {
    "glm": ("GLM-4.5-Air, tiny", False),
    "glm-recomputed": ("GLM-4.5-Air, tiny", True),
    "dense": ("Llama, tiny", False),
    "dense-recomputed": ("Llama, tiny", True),
}
ARMS = ("stock", "ours", *(f"without {name}" for name in SWITCHES))


def batch(number: int, tokens: int, device: str) -> torch.Tensor:
    """Other tokens on every rank and step."""
    generator = torch.Generator().manual_seed(97 * number + torch.distributed.get_rank())
    return torch.randint(0, step_arms.VOCABULARY, (step_arms.BATCH, tokens), generator=generator).to(device)


class Plain:
    """The model without DeepSpeed, and with torch's own linear function; it has an engine's three calls."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.module = model.to(device, torch.bfloat16)

    def __call__(self, **inputs: Any) -> Any:
        """Forward."""
        from lightning_zero3.substitution import substituted

        with substituted(torch.nn.functional, "linear", LINEAR):
            return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, and nothing around it."""
        from lightning_zero3.substitution import substituted

        with substituted(torch.nn.functional, "linear", LINEAR):
            loss.backward()

    def step(self) -> None:
        """No optimizer: it is forward and backward that are compared."""
        self.module.zero_grad()


def micro_step(engine: Any, ids: torch.Tensor, device: str) -> tuple[list[float], list[float], float]:
    """Milliseconds of forward, backward and step by the wall clock and of this thread, and the loss."""
    times, busy = [], []
    step_cost._synchronize(device)
    began, worked = time.perf_counter(), time.thread_time()
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    for call in (lambda: engine.backward(loss), engine.step, None):
        step_cost._synchronize(device)
        now, done = time.perf_counter(), time.thread_time()
        times.append(1e3 * (now - began))
        busy.append(1e3 * (done - worked))
        began, worked = now, done
        if call is not None:
            call()
    return times, busy, loss.item()


def calls_in_micro_step(engine: Any, ids: torch.Tensor) -> int:
    """Calls in forward and backward."""
    calls = step_arms.calls_in(lambda: engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss))
    engine.step()
    return calls


def counts(engine: Any, ids: torch.Tensor) -> dict[str, int]:
    """What one micro-step launches and calls."""
    from deepspeed.accelerator import get_accelerator

    from lightning_zero3.collective_counts import counted_collectives
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
        with counted_collectives() as collectives:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            forward = collectives.count
            engine.backward(loss)
            backward = collectives.count
            engine.step()
    seen["calls"] = calls_in_micro_step(engine, ids)
    named = {"forward": forward, "backward": backward - forward, "step": collectives.count - backward}
    return {**{f"collectives in {phase}": count for phase, count in named.items()}, **seen}


def measure(name_of_case: str, *, chosen_arms: list[str], tokens: int, steps: int, device: str) -> dict[str, Any]:
    """One case: stock, ours, ours less one switch, and the plain model."""
    from lightning_zero3.optimizer.switches import Switches

    model, recompute = CASES[name_of_case]
    arms: dict[str, Any] = {"stock": None, "ours": Switches()}
    arms |= {f"without {name}": Switches(**{name: False}) for name in SWITCHES}
    arms = {name: arms[name] for name in arms if name in chosen_arms}

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
    busy: dict[str, list[list[float]]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(WARM_UP + steps):
        ids = batch(number, tokens, device)
        for name in engines if number % 2 == 0 else reversed(engines):
            torch.distributed.barrier()
            taken, worked, loss = micro_step(engines[name], ids, device)
            times[name].append(taken)
            busy[name].append(worked)
            losses[name].append(loss)
    medians, thread = _medians(times), _medians(busy)
    case = {
        "model": model,
        "ranks": torch.distributed.get_world_size(),
        "recompute": recompute,
        "tokens": tokens,
        "steps": steps,
        "medians_ms": medians,
        "thread_medians_ms": thread,
        "overhead_over_plain": _overheads(medians),
        "overhead_over_plain_by_thread": _overheads(thread),
        "whole_step": sum(medians["ours"].values()) / sum(medians["stock"].values()),
        "counts": {
            **{name: counts(engines[name], batch(1000, tokens, device)) for name in ("stock", "ours")},
            "plain": {"calls": calls_in_micro_step(engines["plain"], batch(1000, tokens, device))},
        },
        "same_bits": losses["ours"] == losses["stock"] and step_arms.same_bits(engines["stock"], engines["ours"]),
    }
    for name in arms:
        engines[name].destroy()
    return case


def _medians(times: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    return {
        name: dict(zip(PHASES, map(statistics.median, zip(*every[WARM_UP:], strict=True)), strict=True))
        for name, every in times.items()
    }


def _overheads(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    """What each arm's forward and backward take beyond the plain model's, as a share of stock's."""
    over = {name: phases["forward"] + phases["backward"] for name, phases in medians.items()}
    plain = over.pop("plain")
    stock = over.pop("stock") - plain
    return {name: (value - plain) / stock for name, value in over.items()}


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one process of a group does; all return the same."""
    step_cost.join_group(options.device)
    return [
        measure(case, chosen_arms=options.arms, tokens=tokens, steps=options.steps, device=options.device)
        for case in options.cases
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
        alone = case["overhead_over_plain_by_thread"].get(name)
        beside = "" if share is None else f"  overhead over plain {share:.3f} of stock's ({alone:.3f} of its thread's)"
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
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument(
        "--arms", nargs="*", default=list(ARMS), choices=ARMS, help="stock and ours are always among them"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds that a case may take on its ranks")
    parser.add_argument("--worker", action="store_true", help="internal")
    options = parser.parse_args()
    options.arms = list(dict.fromkeys(("stock", "ours", *options.arms)))
    if options.worker:
        answer(work(options))
        return
    arguments = ["--device", options.device, "--steps", str(options.steps), "--tokens", *map(str, options.tokens)]
    arguments += ["--arms", *options.arms]
    report: dict[str, Any] = {"versions": step_cost.versions(), "cases": []}
    for ranks in options.ranks:
        # A group of processes for each case: what one leaves behind slows the next one down.
        for name in options.cases:
            for case in start(__file__, ranks, [*arguments, "--cases", name], limit=options.limit):
                show(case)
                report["cases"].append(case)
            step_cost.keep(report, options.json)


if __name__ == "__main__":
    main()
