# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's set-up of a run looks like on one rank: its parameters, sub-groups, dtypes and buckets.

Only data, all of it JSON: it comes out of a process of its own (:mod:`lightning_zero3.plan.child`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Bytes of an element, by the names that ``precision.py`` uses.
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """One parameter tensor on the planned rank, as the optimizer has it.

    Args:
        name: In the engine's module, e.g. ``layers.3.mlp.experts.w1``.
        shape: Of the whole tensor that this rank gathers: its own experts, its own tensor-parallel slice.
        elements: In that shape.
        partition_elements: What this rank keeps of it between steps, padding included.
        kind: ``dense``, ``expert`` (held by ``expert_parallel_size`` ranks together) or ``router``.
        group_size: Ranks that it is partitioned over.
        persistent: Whether it stays gathered between steps (smaller than the persistence threshold).
        sub_group: Index of its sub-group; None where it isn't trained.
        requires_grad: Whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    partition_elements: int
    kind: str
    group_size: int
    persistent: bool
    sub_group: int | None
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Names as in ``precision.py``: ``fp32``, ``bf16``, ``fp16``.

    Args:
        weights: What forward reads and ranks gather.
        masters: What the optimizer updates.
        states: The optimizer's moments.
        gradients: What micro-batches are added up in (the flat buffer of partitions).
        reductions: What gradients are sent in.
    """

    weights: str
    masters: str
    states: str
    gradients: str
    reductions: str


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A buffer that gradients are collected in before they are reduced.

    Args:
        dtype: Of its elements.
        elements: Its size.
    """

    dtype: str
    elements: int


@dataclass(frozen=True, kw_only=True)
class NormReduction:
    """Sub-groups whose norms are reduced over the same process groups.

    Args:
        group_sizes: Ranks of each of these groups, in the order of the reductions; groups of one rank are left out.
        sub_groups: Which sub-groups.
    """

    group_sizes: tuple[int, ...]
    sub_groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PersistentGather:
    """Persistent parameters that are gathered over the same ranks in one dtype after each step.

    Args:
        group_size: Ranks.
        dtype: Of the weights.
        parameters: How many.
        elements: In them, whole.
    """

    group_size: int
    dtype: str
    parameters: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """How many collectives one optimizer step launches (``DeepSpeedZeroOptimizer_Stage3.step``).

    Args:
        all_reduce: Of norms and of the overflow flag.
        all_gather: Of persistent parameters.
    """

    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        """Both kinds together."""
        return self.all_reduce + self.all_gather


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What one rank holds.

    Args:
        deepspeed: Version of the DeepSpeed that built it.
        model_parameters: Elements of the whole model.
        parameters: Every parameter tensor on this rank, frozen ones too.
        sub_groups: Elements of this rank's partition of each sub-group, padding included.
        elements_per_rank: Their sum: what this rank updates.
        optimizer_groups: Groups that the optimizer itself has.
        dtypes: Of weights, masters, states and gradients.
        aliased: Whether zero3_fast's alias makes weights and masters one tensor in this set-up.
        masters_bytes: Of masters in a storage of their own, as in stock DeepSpeed; aliased ones take none.
        buckets: For gradients on their way.
        buffers_bytes: Of the model's buffers on this rank.
        norms: Process groups of the gradient norms.
        persistent_gathers: What is gathered after each step.
        gradient_clear_visits_stock: Parameters that one step of the installed DeepSpeed visits to clear gradients.
        collectives_stock: Of one step with stock Stage 3.
    """

    deepspeed: str
    model_parameters: int
    parameters: tuple[PlannedParameter, ...]
    sub_groups: tuple[int, ...]
    elements_per_rank: int
    optimizer_groups: int
    dtypes: Dtypes
    aliased: bool
    masters_bytes: int
    buckets: tuple[Bucket, ...]
    buffers_bytes: int
    norms: tuple[NormReduction, ...]
    persistent_gathers: tuple[PersistentGather, ...]
    gradient_clear_visits_stock: int
    collectives_stock: Collectives

    @property
    def trained(self) -> tuple[PlannedParameter, ...]:
        """Parameters that have a sub-group."""
        return tuple(p for p in self.parameters if p.sub_group is not None)

    @property
    def second_copy_bytes(self) -> int:
        """Of masters that stock DeepSpeed keeps beside weights of the same dtype; of another dtype they are no copy."""
        return self.masters_bytes if self.dtypes.weights == self.dtypes.masters else 0

    @property
    def collectives_ours(self) -> Collectives:
        """Of one step with zero3_fast."""
        return Collectives(
            all_reduce=sum(len(norm.group_sizes) for norm in self.norms),
            all_gather=sum(gather.group_size > 1 for gather in self.persistent_gathers),
        )

    @property
    def gradient_clear_visits_per_sub_group(self) -> int:
        """Visits of one step where each sub-group's preparation clears all parameters (DeepSpeed up to 0.19.7)."""
        return len(self.sub_groups) * len(self.trained)

    @property
    def gradient_clear_visits_ours(self) -> int:
        """Visits of one step with zero3_fast: each parameter once."""
        return len(self.trained)

    def to_json(self) -> dict[str, Any]:
        """All of it as what JSON knows."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Structure:
        """What :meth:`to_json` has written."""
        fields = dict(data)
        fields["parameters"] = tuple(
            PlannedParameter(**{**p, "shape": tuple(p["shape"])}) for p in fields["parameters"]
        )
        fields["sub_groups"] = tuple(fields["sub_groups"])
        fields["dtypes"] = Dtypes(**fields["dtypes"])
        fields["buckets"] = tuple(Bucket(**b) for b in fields["buckets"])
        fields["norms"] = tuple(
            NormReduction(group_sizes=tuple(n["group_sizes"]), sub_groups=tuple(n["sub_groups"]))
            for n in fields["norms"]
        )
        fields["persistent_gathers"] = tuple(PersistentGather(**g) for g in fields["persistent_gathers"])
        fields["collectives_stock"] = Collectives(**fields["collectives_stock"])
        return cls(**fields)
