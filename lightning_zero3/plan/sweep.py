# SPDX-License-Identifier: Apache-2.0
"""All combinations of expert and tensor parallelism, precision and offload of one model on one set of GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_zero3.config import SetupError
from lightning_zero3.gpus import Gpu
from lightning_zero3.plan.child import Found, Job, find_all
from lightning_zero3.plan.depth import MORE, jobs_of, scene_of
from lightning_zero3.plan.derive import derive
from lightning_zero3.plan.estimate import found_or_raise, rehearsed_whole
from lightning_zero3.plan.memory import GIB, Memory, held_bytes, memory_of
from lightning_zero3.plan.models import load_model
from lightning_zero3.plan.predict import predict
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import Shape, shape_of
from lightning_zero3.plan.structure import Structure
from lightning_zero3.topology import divisors

_PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"precision": "32-true", "bf16_masters": False},
    {"precision": "bf16-mixed", "bf16_masters": False},
    {"precision": "bf16-mixed", "bf16_masters": True},
)
_OFFLOADS: tuple[Mapping[str, Any], ...] = (
    {"offload_optimizer": False, "offload_parameters": False},
    {"offload_optimizer": True, "offload_parameters": False},
    {"offload_optimizer": True, "offload_parameters": True},
)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What needs a set-up of its own."""

    expert_parallel_size: int | None
    tensor_parallel_size: int


def swept(setup: Setup, gpu: Gpu, *, fixed: Collection[str] = ()) -> dict[str, Any]:
    """Try everything.

    DeepSpeed's own set-up builds the whole model once for each tensor parallel size, and its first layers for each
    layout; everything else follows by arithmetic.

    Args:
        setup: The run; what is varied is taken from it only where it is fixed.
        gpu: The GPU.
        fixed: Names of what isn't varied.

    Returns:
        ``combinations``: those that fit, by the least time for the same number of tokens; ``impossible``: the others,
        with a reason.

    Raises:
        SetupError: The model can't be planned at all.
    """
    planned = load_model(setup)
    shape = shape_of(planned.config)
    setups, impossible = _possible(setup, shape, frozenset(fixed))
    structures, refused = _structures(setups, planned_layers=len(shape.layer_types))
    found: list[dict[str, Any]] = []
    fitting: dict[Setup, Structure] = {}
    for each in setups:
        layout = _layout(each)
        if layout in refused:
            impossible.append(_row(each) | {"reason": refused[layout]})
            continue
        structure = derive(*structures[layout], each)
        over = held_bytes(each, structure) - gpu.memory_gib * GIB
        if over > 0:
            impossible.append(_row(each) | _too_much(over, "between steps already", gpu))
        else:
            fitting[each] = structure
    for each, memory in _memories(fitting, shape):
        if isinstance(memory, SetupError):
            impossible.append(_row(each) | {"reason": str(memory)})
        elif not memory.fits(gpu):
            impossible.append(_row(each) | _too_much(memory.total - gpu.memory_gib * GIB, "at its peak", gpu))
        else:
            found.append(_row(each) | _figures(each, fitting[each], memory, shape, gpu))
    return {
        "title": planned.title,
        "gpu": gpu.name,
        "gpu_gib": gpu.memory_gib,
        "setup": setup.to_json(),
        "world_size": setup.world_size,
        "combinations": sorted(found, key=lambda row: (row["seconds_per_million_tokens"], row["total_gib"])),
        "impossible": impossible,
    }


def _possible(setup: Setup, shape: Shape, fixed: frozenset[str]) -> tuple[list[Setup], list[dict[str, Any]]]:
    """Setups whose sizes go together, and the others with the reason."""
    setups: list[Setup] = []
    impossible: list[dict[str, Any]] = []
    for choice in _choices(setup, shape, fixed):
        try:
            each = replace(setup, **choice)
            if each.expert_parallel_size is not None:
                each.topology.require_experts_divide(shape.experts, "each MoE layer")
            if each.tensor_parallel_size > 1:
                each.topology.require_divides(shape.heads, "attention heads")
                each.topology.require_divides(shape.key_value_heads, "heads of keys and values")
            setups.append(each)
        except SetupError as error:  # noqa: PERF203 (each choice may be refused)
            impossible.append({**_row(setup), **choice, "reason": str(error)})
    return setups, impossible


def _choices(setup: Setup, shape: Shape, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    experts: list[dict[str, Any]] = [{"expert_parallel_size": size} for size in divisors(setup.world_size)]
    if not shape.experts:
        experts = [{"expert_parallel_size": None}]
    tensors = [{"tensor_parallel_size": size} for size in divisors(setup.devices)]
    seen = set()
    for parts in itertools.product(experts, tensors, _PRECISIONS, _OFFLOADS):
        choice: dict[str, Any] = {}
        for part in parts:
            choice |= part
        choice |= {name: getattr(setup, name) for name in fixed if name in choice}
        if choice["precision"] == "32-true" and choice["bf16_masters"] and "bf16_masters" not in fixed:
            continue
        key = tuple(choice.items())
        if key not in seen:
            seen.add(key)
            yield choice


def _layout(setup: Setup) -> _Layout:
    return _Layout(expert_parallel_size=setup.expert_parallel_size, tensor_parallel_size=setup.tensor_parallel_size)


def _structures(
    setups: list[Setup], planned_layers: int
) -> tuple[dict[_Layout, tuple[Structure, Setup]], dict[_Layout, str]]:
    """For each layout the structure that others are derived from, or the reason why there is none."""
    layouts: dict[_Layout, Setup] = {}
    for each in setups:
        layouts.setdefault(_layout(each), each)
    # What the product refuses, it refuses of the first layers too. One layout of each tensor parallel size is built
    # whole at once; where that is refused, another one.
    bases = {layout.tensor_parallel_size: each for layout, each in reversed(layouts.items())}
    shallow = [Job(setup=replace(each, layers=min(planned_layers, MORE))) for each in layouts.values()]
    answers = find_all([*shallow, *(Job(setup=each) for each in bases.values())])
    tried, whole = answers[: len(layouts)], dict(zip(bases, answers[len(layouts) :], strict=True))
    refused = {lay: str(found) for lay, found in zip(layouts, tried, strict=True) if isinstance(found, SetupError)}
    again = {
        layout.tensor_parallel_size: each
        for layout, each in layouts.items()
        if layout not in refused and isinstance(whole[layout.tensor_parallel_size], SetupError)
    }
    if again:
        bases |= again
        whole |= zip(again, find_all([Job(setup=each) for each in again.values()]), strict=True)
    structures: dict[_Layout, tuple[Structure, Setup]] = {}
    for layout in layouts:
        if layout in refused:
            continue
        base = whole[layout.tensor_parallel_size]
        if isinstance(base, Found):
            structures[layout] = (base.structure, bases[layout.tensor_parallel_size])
        else:
            refused[layout] = str(base)
    return structures, refused


def _memories(fitting: Mapping[Setup, Structure], shape: Shape) -> Iterator[tuple[Setup, Memory | SetupError]]:
    """Rehearse the first layers once for what offload has in common."""
    layers = len(shape.layer_types)
    kinds: dict[Setup, list[Setup]] = {}
    for each in fitting:
        kinds.setdefault(replace(each, offload_optimizer=False, offload_parameters=False), []).append(each)
    jobs = {kind: jobs_of(kind, layers, (scene_of(kind),)) for kind in kinds}
    answers = iter(find_all([job for several in jobs.values() for job in several]))
    for kind, members in kinds.items():
        part = [next(answers) for _ in jobs[kind]]
        for each in members:
            try:
                found = found_or_raise(part)
            except SetupError as error:
                yield each, error
                continue
            (rehearsal,) = rehearsed_whole(shape, fitting[each], found, (scene_of(kind),))
            yield each, memory_of(each, fitting[each], rehearsal)


def _row(setup: Setup) -> dict[str, Any]:
    names = (
        "expert_parallel_size",
        "tensor_parallel_size",
        "precision",
        "bf16_masters",
        "offload_optimizer",
        "offload_parameters",
    )
    return {name: getattr(setup, name) for name in names}


def _too_much(over: float, when: str, gpu: Gpu) -> dict[str, Any]:
    return {"reason": f"{over / GIB:.1f} GiB more than an {gpu.name} has, {when}", "over_gib": round(over / GIB, 3)}


def _figures(setup: Setup, structure: Structure, memory: Memory, shape: Shape, gpu: Gpu) -> dict[str, Any]:
    prediction = predict(setup, structure, shape)
    bounds = prediction.bounds[gpu.name]
    return {
        "seconds_per_step": bounds.with_overlap,
        "tokens_per_step": prediction.tokens_per_step,
        "seconds_per_million_tokens": prediction.seconds_per_million_tokens(gpu.name),
        "optimizer_seconds": bounds.optimizer,
        "compute_seconds": bounds.compute,
        "node_links_seconds": bounds.node_links,
        "network_seconds": bounds.network,
        "host_link_seconds": bounds.host_link,
        "between_steps_gib": memory.between_steps / GIB,
        "total_gib": memory.total / GIB,
        "host_gib": sum(memory.host.values()) / GIB,
        "sub_groups": len(structure.sub_groups),
    }
