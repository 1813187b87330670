# SPDX-License-Identifier: Apache-2.0
"""A structure at other sizes, by arithmetic on one that DeepSpeed's own set-up gave: other worlds, experts, precisions.

What a rank holds of each tensor, how tensors are put into sub-groups and what is reduced over whom follow DeepSpeed's
rules, repeated here (0.19.7, 0.19.8): ``split_params_into_different_moe_groups_for_optimizer``,
``_get_trainable_parameter_groups`` and ``_create_fp16_sub_groups``. Before a structure is derived, these rules must
give the one that it is derived from; else there is an error and no guess. Tests compare derived structures with built
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from packaging.version import Version

from lightning_zero3.config import SetupError
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import (
    ELEMENT_BYTES,
    Bucket,
    Collectives,
    Dtypes,
    NormReduction,
    PersistentGather,
    PlannedParameter,
    Structure,
)

# The default of split_params_into_different_moe_groups_for_optimizer.
AUTOEP_CAP = 178_956_971


def derive(base: Structure, built: Setup, wanted: Setup) -> Structure:
    """What another run's rank holds.

    Args:
        base: Of a rank of ``built``.
        built: What was set up.
        wanted: The same but for nodes, devices, the size of expert parallelism (on in both, or off in both), precision
            and masters, and for what moves or repeats what a rank holds: offload, tokens, recomputation.

    Raises:
        SetupError: The two differ in more, sizes don't divide, or the rules here don't give ``base`` itself.
    """
    _check(built, wanted)
    merged = _is_merged(base, built)
    derived = _at(base, built, wanted, merged)
    return _in_precision(derived, wanted)


def _check(built: Setup, wanted: Setup) -> None:
    for name in (
        "recipe",
        "model",
        "layers",
        "tensor_parallel_size",
        "optimizer",
        "sub_group_size",
        "reduce_bucket_size",
        "persistence_threshold",
        "max_group_size",
        "zero_init",
    ):
        if getattr(built, name) != getattr(wanted, name):
            raise SetupError(f"A structure with another {name} can't be derived; it has to be built.")
    if (built.expert_parallel_size is None) != (wanted.expert_parallel_size is None):
        raise SetupError("A structure with expert parallelism can't be derived from one without.")


def _is_merged(base: Structure, built: Setup) -> bool:
    """Whether all but experts share a process group and so sub-groups.

    Under zero.Init they don't: what is made later (AutoEP's routers, AutoTP's layers) is partitioned over another one.
    """
    for merged in (False, True):
        if _at(base, built, built, merged) == base:
            return merged
    raise SetupError(
        "This model's sub-groups follow other rules than those that are known; nothing can be derived from them."
    )


def _at(base: Structure, built: Setup, wanted: Setup, merged: bool) -> Structure:
    """With other sizes, in the base's dtypes."""
    parameters = [_resized(p, built, wanted) for p in base.parameters]
    families = {p.name: _family(p, built, merged) for p in base.parameters}
    trained = [p for p, before in zip(parameters, base.parameters, strict=True) if before.sub_group is not None]
    groups = _groups(trained, families, wanted)
    sub_groups = [part for group in groups for part in _sub_groups(group, wanted.sub_group_size)]
    where = {p.name: index for index, members in enumerate(sub_groups) for p in members}
    parameters = [replace(p, sub_group=where.get(p.name)) for p in parameters]
    sizes = tuple(sum(p.partition_elements for p in members) for members in sub_groups)
    kinds = [families[members[0].name] for members in sub_groups]
    groups_of = {kind: _norm_groups(kind, members[0], wanted) for kind, members in zip(kinds, sub_groups, strict=True)}
    gathers = _gathers(parameters, families, base.dtypes.weights)
    leaves_out = Version(base.deepspeed) >= Version("0.19.8")  # groups of one rank
    reductions = sum(1 + sum(size > 1 or not leaves_out for _, size in groups_of[kind][1:]) for kind in kinds)
    clears_once = base.gradient_clear_visits_stock == len(base.trained)
    return replace(
        base,
        parameters=tuple(parameters),
        sub_groups=sizes,
        elements_per_rank=sum(sizes),
        # DeepSpeed's own optimizer has experts' groups; process groups are told apart by Stage 3 only.
        optimizer_groups=1 if wanted.optimizer == "torch" else 1 + sum(families[g[0].name] == "expert" for g in groups),
        masters_bytes=ELEMENT_BYTES[base.dtypes.masters] * sum(sizes),
        norms=_norms(kinds, groups_of),
        persistent_gathers=gathers,
        gradient_clear_visits_stock=len(trained) * (1 if clears_once else len(sizes)),
        collectives_stock=Collectives(
            all_reduce=reductions, all_gather=sum(g.parameters for g in gathers if g.group_size > 1)
        ),
    )


def _family(parameter: PlannedParameter, built: Setup, merged: bool) -> str:
    """Tensors of one family are partitioned over one process group."""
    if parameter.kind == "expert" and built.expert_parallel_size is not None:
        return "expert"
    late = parameter.kind == "router" or parameter.group_size != built.world_size
    return "late" if late and not merged else "early"


def _resized(parameter: PlannedParameter, built: Setup, wanted: Setup) -> PlannedParameter:
    """One tensor's share: experts over the ranks that hold the same ones, all else over the same part of the world."""
    shape, elements = parameter.shape, parameter.elements
    experts = parameter.kind == "expert" and wanted.expert_parallel_size is not None
    if experts:
        whole = shape[0] * (built.expert_parallel_size or 1)
        wanted.topology.require_experts_divide(whole, parameter.name.partition(".experts.")[0])
        shape = (whole // (wanted.expert_parallel_size or 1), *shape[1:])
        elements = elements // parameter.shape[0] * shape[0]
        ranks = wanted.world_size // (wanted.expert_parallel_size or 1)
    else:
        ranks = wanted.world_size * parameter.group_size // built.world_size
    return replace(
        parameter,
        shape=shape,
        elements=elements,
        partition_elements=-(-elements // ranks),
        group_size=ranks,
        persistent=elements <= wanted.persistence_threshold,
    )


def _groups(
    trained: Sequence[PlannedParameter], families: dict[str, str], wanted: Setup
) -> list[list[PlannedParameter]]:
    """What sub-groups are cut from: one list for each process group, experts' cut where DeepSpeed groups them."""
    found: dict[str, list[PlannedParameter]] = {}
    for parameter in trained:
        found.setdefault(families[parameter.name], []).append(parameter)
    if wanted.optimizer == "torch":
        return list(found.values())
    experts = found.pop("expert", [])
    cap = AUTOEP_CAP if wanted.max_group_size is None else wanted.max_group_size or float("inf")
    return [*found.values(), *_cut(experts, cap)]


def _cut(parameters: Iterable[PlannedParameter], cap: float) -> list[list[PlannedParameter]]:
    groups: list[list[PlannedParameter]] = []
    size = 0
    for parameter in parameters:
        if not groups or size + parameter.elements > cap:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.elements
    return groups


def _sub_groups(group: list[PlannedParameter], most: int) -> list[list[PlannedParameter]]:
    if most >= sum(p.partition_elements for p in group):
        return [group]
    found: list[list[PlannedParameter]] = [[]]
    size = 0
    for parameter in group:
        found[-1].append(parameter)
        size += parameter.partition_elements
        if size >= most:
            found.append([])
            size = 0
    return [members for members in found if members]


def _norm_groups(kind: str, one: PlannedParameter, wanted: Setup) -> list[tuple[str, int]]:
    """Process groups that a sub-group's norm is reduced over, by a label and by their size."""
    groups = [(kind, one.group_size)]
    if kind == "expert" and wanted.expert_parallel_size is not None:
        return [*groups, ("expert parallel", wanted.expert_parallel_size)]
    # A tensor that every rank of the world has a part of is counted by the first group already.
    if wanted.tensor_parallel_size > 1 and one.group_size < wanted.world_size:
        # Of all ranks, it is the group that early tensors are partitioned over.
        everybody = wanted.tensor_parallel_size == wanted.world_size
        groups.append(("early" if everybody else "tensor parallel", wanted.tensor_parallel_size))
    return groups


def _norms(kinds: Sequence[str], groups_of: dict[str, list[tuple[str, int]]]) -> tuple[NormReduction, ...]:
    classes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for index, kind in enumerate(kinds):
        wide = tuple(group for group in groups_of[kind] if group[1] > 1)
        classes.setdefault(wide, []).append(index)
    return tuple(
        NormReduction(group_sizes=tuple(size for _, size in groups), sub_groups=tuple(members))
        for groups, members in classes.items()
    )


def _gathers(
    parameters: Iterable[PlannedParameter], families: dict[str, str], dtype: str
) -> tuple[PersistentGather, ...]:
    members: dict[str, list[PlannedParameter]] = {}
    for parameter in parameters:
        if parameter.persistent:
            members.setdefault(families[parameter.name], []).append(parameter)
    return tuple(
        PersistentGather(
            group_size=found[0].group_size,
            dtype=dtype,
            parameters=len(found),
            elements=sum(p.elements for p in found),
        )
        for found in members.values()
    )


def _in_precision(structure: Structure, wanted: Setup) -> Structure:
    """In a setup's dtypes: they change no partition and no sub-group."""
    weights = "fp32" if wanted.precision == "32-true" else "bf16"
    masters = "bf16" if wanted.bf16_masters else "fp32"
    dtypes = Dtypes(weights=weights, masters=masters, states=masters, gradients=weights, reductions=weights)
    return replace(
        structure,
        dtypes=dtypes,
        aliased=weights == masters,
        masters_bytes=ELEMENT_BYTES[masters] * structure.elements_per_rank,
        buckets=tuple(Bucket(dtype=weights, elements=bucket.elements) for bucket in structure.buckets),
        persistent_gathers=tuple(replace(gather, dtype=weights) for gather in structure.persistent_gathers),
    )
