# SPDX-License-Identifier: Apache-2.0
"""What a rank's memory holds, by part and in bytes: arithmetic on a structure and on a rehearsal of the first steps.

What is held between steps follows from the structure: so many elements of so many bytes. What lives for a while was
counted in the rehearsal. What neither sees (the CUDA context, NCCL's buffers, what the allocator can't use) is an
allowance, marked as the estimate that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_zero3.gpus import GPUS, Gpu
from lightning_zero3.plan.meter import ACTIVATIONS, LOGITS
from lightning_zero3.plan.rehearsal import Peak, Rehearsal
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import ELEMENT_BYTES, Structure

GIB = 2**30
# Estimates, not measured by this project: a CUDA context with loaded kernels takes 0.5 to 1 GiB, NCCL some hundred MiB
# for each of a few communicators, and a caching allocator whose blocks don't fit exactly a few per cent of its peak.
CONTEXT_BYTES = 1 * GIB
COMMUNICATION_BYTES = 1 * GIB
FRAGMENTATION = 0.03
# Adam's.
_MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One rank's memory with zero3_fast, and with stock DeepSpeed. Bytes, as a GPU's ``memory_allocated`` counts them.

    Args:
        parts: Held on the GPU between steps, by part.
        host: Held on the host, by part, with offload.
        second_copy: What stock keeps beside ``parts``; the alias saves it.
        forward_backward: Of a micro-step, beyond what is held.
        step: Of an optimizer step, beyond what is held.
        host_step: Of an optimizer step on the host, beyond what is held there, with torch's AdamW; DeepSpeed's CPUAdam
            needs none.
        stock_step: Of one of stock's.
        activations: The most that activations take at once, with and without recomputation, as far as rehearsed.
        logits: The most that logits and loss take at once, by the number of tiles, as far as rehearsed.
    """

    parts: Mapping[str, int]
    host: Mapping[str, int]
    second_copy: int
    forward_backward: Peak
    step: Peak
    host_step: int
    stock_step: Peak
    activations: Mapping[str, int]
    logits: Mapping[str, int]

    @property
    def between_steps(self) -> int:
        """Held between steps."""
        return sum(self.parts.values())

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return self.between_steps + max(self.forward_backward.bytes, self.step.bytes)

    @property
    def stock_between_steps(self) -> int:
        """Held between steps with stock DeepSpeed."""
        return self.between_steps + self.second_copy

    @property
    def stock_peak(self) -> int:
        """The most at any moment with stock DeepSpeed."""
        return self.stock_between_steps + max(self.forward_backward.bytes, self.stock_step.bytes)

    @property
    def allowance(self) -> int:
        """For what isn't a tensor; an estimate."""
        return CONTEXT_BYTES + COMMUNICATION_BYTES + int(FRAGMENTATION * self.peak)

    @property
    def total(self) -> int:
        """The peak with the allowance."""
        return self.peak + self.allowance

    def fits(self, gpu: Gpu) -> bool:
        """Whether all of it, with the allowance, is less than a GPU has.

        Args:
            gpu: The GPU.
        """
        return self.total <= gpu.memory_gib * GIB

    def to_json(self) -> dict[str, Any]:
        """By part, in GiB."""

        def gib(value: Any) -> Any:
            return {k: gib(v) for k, v in value.items()} if isinstance(value, Mapping) else round(value / GIB, 4)

        return {
            **gib(asdict(self)),
            "between_steps": gib(self.between_steps),
            "peak_forward_backward": gib(self.between_steps + self.forward_backward.bytes),
            "peak_step": gib(self.between_steps + self.step.bytes),
            "peak": gib(self.peak),
            "stock_between_steps": gib(self.stock_between_steps),
            "stock_peak": gib(self.stock_peak),
            "allowance_estimated": gib(self.allowance),
            "total": gib(self.total),
            "fits": {name: self.fits(gpu) for name, gpu in GPUS.items()},
            "capacity": {name: gpu.memory_gib for name, gpu in GPUS.items()},
        }


def memory_of(setup: Setup, structure: Structure, rehearsal: Rehearsal, others: Sequence[Rehearsal] = ()) -> Memory:
    """Put a rank's memory together.

    Args:
        setup: The run.
        structure: Of its rank.
        rehearsal: Of the run.
        others: Of the same run with other recomputation or tiles, for comparison.
    """
    parts, host = _held(setup, structure)
    if rehearsal.held is not None and not setup.offloads:
        # Counters, flags and whatever else is small.
        parts["other"] = rehearsal.held - sum(parts.values())
    nothing = Peak(bytes=0, by_kind={}, most={})
    every = [rehearsal, *others]
    return Memory(
        parts=parts,
        host=host,
        second_copy=saved_bytes(setup, structure),
        forward_backward=rehearsal.forward_backward,
        step=nothing if setup.offload_optimizer else rehearsal.step,
        host_step=_host_step(structure) if setup.offload_optimizer else 0,
        stock_step=nothing if setup.offload_optimizer else rehearsal.stock_step,
        activations={
            "recomputed" if r.recompute_activations else "kept": r.forward_backward.most.get(ACTIVATIONS, 0)
            for r in every
        },
        logits={str(r.loss_tiles): r.forward_backward.most.get(LOGITS, 0) for r in every},
    )


def _held(setup: Setup, structure: Structure) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part between steps: on the GPU, on the host."""
    dtypes = structure.dtypes
    weight, master = ELEMENT_BYTES[dtypes.weights], ELEMENT_BYTES[dtypes.masters]
    elements = structure.elements_per_rank
    gathered = sum(
        # Of one rank, a gathered parameter is a view of its partition.
        p.partition_elements * p.group_size
        for p in structure.parameters
        if p.persistent and p.group_size > 1
    )
    device = {
        "weights": weight * sum(p.partition_elements for p in structure.parameters),
        "persistent parameters": weight * gathered,
        "buckets": sum(ELEMENT_BYTES[bucket.dtype] * bucket.elements for bucket in structure.buckets),
        "buffers": structure.buffers_bytes,
    }
    updated = {
        "masters": 0 if is_aliased(setup, structure) else master * elements,
        "gradients": ELEMENT_BYTES[dtypes.gradients] * elements,
        "optimizer states": _MOMENTS * ELEMENT_BYTES[dtypes.states] * elements,
    }
    host: dict[str, int] = {}
    if setup.offload_optimizer:
        # Each sub-group's gradients in the masters' dtype stay on the host, beside those that are added up.
        host = {**updated, "gradients of masters": master * elements}
    else:
        device |= updated
    if setup.offload_parameters:
        host["weights"] = device.pop("weights")
    return device, host


def held_bytes(setup: Setup, structure: Structure) -> int:
    """What a rank holds on its GPU between steps, without what is too small to count.

    Args:
        setup: The run.
        structure: Of its rank.
    """
    return sum(_held(setup, structure)[0].values())


def is_aliased(setup: Setup, structure: Structure) -> bool:
    """Whether masters are the weights themselves; with offload, which a structure knows nothing of, they aren't.

    Args:
        setup: The run.
        structure: Of its rank.
    """
    return structure.aliased and not setup.offloads


def saved_bytes(setup: Setup, structure: Structure) -> int:
    """Of the second copy of the weights that stock DeepSpeed keeps and this run doesn't.

    Args:
        setup: The run.
        structure: Of its rank.
    """
    return structure.second_copy_bytes if is_aliased(setup, structure) else 0


def _host_step(structure: Structure) -> int:
    """Torch's AdamW has the denominator and its root at once, for one sub-group after the other."""
    return 2 * ELEMENT_BYTES[structure.dtypes.masters] * max(structure.sub_groups)
