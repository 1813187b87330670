# SPDX-License-Identifier: Apache-2.0
"""What a plan says, as one JSON object; the tables are made of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning_zero3.gpus import Gpu
from lightning_zero3.plan.derive import AUTOEP_CAP
from lightning_zero3.plan.memory import GIB, Memory, is_aliased, saved_bytes
from lightning_zero3.plan.predict import Prediction
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import ELEMENT_BYTES, Structure


def assemble(
    title: str,
    setup: Setup,
    structure: Structure,
    as_it_is: Structure | None = None,
    *,
    memory: Memory | None = None,
    prediction: Prediction | None = None,
    gpu: Gpu | None = None,
) -> dict[str, Any]:
    """Join all that was found out.

    Args:
        title: The model's.
        setup: The run.
        structure: Of its rank.
        as_it_is: With AutoEP's own cap, where the setup has another one.
        memory: Of its rank, where its steps were rehearsed.
        prediction: Of a step.
        gpu: Which the memory is held against.
    """
    report: dict[str, Any] = {
        "title": title,
        "deepspeed": structure.deepspeed,
        "setup": setup.to_json(),
        "world_size": setup.world_size,
        "model_parameters": structure.model_parameters,
        **_counts(structure),
        "elements_per_rank": structure.elements_per_rank,
        "kinds": _kinds(structure),
        "dtypes": structure.to_json()["dtypes"],
        "aliased": is_aliased(setup, structure),
        "second_copy_gib": saved_bytes(setup, structure) / GIB,
        "memory_gib": memory.to_json() if memory else None,
        **(prediction.to_json() if prediction else {}),
    }
    if gpu is not None:
        report["gpu"] = gpu.name
        report["gpu_gib"] = gpu.memory_gib
        report["fits"] = memory.fits(gpu) if memory else None
    if as_it_is is not None:
        report["as_deepspeed_is"] = _counts(as_it_is)
        report["max_group_size_means"] = _meaning(structure, as_it_is)
    return report


def _counts(structure: Structure) -> dict[str, Any]:
    return {
        "sub_groups": len(structure.sub_groups),
        "parameters": len(structure.trained),
        "optimizer_groups": structure.optimizer_groups,
        "largest_sub_group": max(structure.sub_groups),
        "largest_sub_group_gradient_gib": _largest_gradient_bytes(structure) / GIB,
        "gradient_clear_visits_per_sub_group": structure.gradient_clear_visits_per_sub_group,
        "gradient_clear_visits_stock": structure.gradient_clear_visits_stock,
        "gradient_clear_visits_ours": structure.gradient_clear_visits_ours,
        "collectives_per_step": {
            name: {"all_reduce": of.all_reduce, "all_gather": of.all_gather, "total": of.total}
            for name, of in (("ours", structure.collectives_ours), ("stock", structure.collectives_stock))
        },
    }


def _largest_gradient_bytes(structure: Structure) -> int:
    """What a step needs at least for one sub-group's gradients in the masters' dtype; 0 where they have it already."""
    if structure.dtypes.gradients == structure.dtypes.masters:
        return 0
    return max(structure.sub_groups) * ELEMENT_BYTES[structure.dtypes.masters]


def _kinds(structure: Structure) -> list[dict[str, Any]]:
    tensors: Counter[tuple[str, int]] = Counter()
    elements: Counter[tuple[str, int]] = Counter()
    for parameter in structure.parameters:
        tensors[parameter.kind, parameter.group_size] += 1
        elements[parameter.kind, parameter.group_size] += parameter.partition_elements
    return [
        {"kind": kind, "group_size": size, "parameters": tensors[kind, size], "elements_per_rank": elements[kind, size]}
        for kind, size in sorted(tensors)
    ]


def _meaning(structure: Structure, as_it_is: Structure) -> dict[str, str]:
    """What another cap would change, in words."""
    now, then = len(as_it_is.sub_groups), len(structure.sub_groups)
    if now == then:
        checkpoint = "The same: sub-groups are those of a run without this change."
    else:
        checkpoint = (
            "Another layout: in a checkpoint, masters and moments are one list entry per sub-group, "
            f"{then} sub-groups instead of {now}."
        )
    before, after = _largest_gradient_bytes(as_it_is) / GIB, _largest_gradient_bytes(structure) / GIB
    bucket = sum(ELEMENT_BYTES[b.dtype] * b.elements for b in structure.buckets) / GIB
    if before == after == 0:
        memory = "None: gradients have the masters' dtype, and nothing is cast."
    else:
        memory = (
            f"A step casts at least one sub-group's gradients: {after:.3f} GiB for the largest, instead of "
            f"{before:.3f}. zero3_fast casts into the idle reduction bucket ({bucket:.3f} GiB), "
            + ("so its peak stays." if after <= bucket else "which would be too small.")
        )
    return {
        "sub_groups": f"{then} instead of {now}",
        "checkpoint": checkpoint,
        "step_memory": memory,
        "training": f"No option changes AutoEP's cap of {AUTOEP_CAP:,} elements in training; this is a plan only.",
    }
