# SPDX-License-Identifier: Apache-2.0
"""What an engine's Stage-3 optimizer holds, as a :class:`~lightning_zero3.plan.structure.Structure`.

Works on a planned engine as on one that trains: the tests compare the two.

Upstream symbols, read: ``fp16_groups``, ``fp16_partitioned_groups_flat``, ``fp32_partitioned_groups_flat``,
``ipg_buckets``, ``grad_partitions_flat_buffer``, ``persistent_parameters``, ``communication_data_type``,
``master_weights_and_grads_dtype`` of the optimizer; ``ds_numel``, ``ds_shape``, ``ds_persist``, ``partition_numel``,
``ds_process_group`` and ``allreduce`` of parameters (0.19.7, 0.19.8). Detected by tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero3.capabilities.fixes import GRAD_CLEAR
from lightning_zero3.capabilities.probing import referenced_names
from lightning_zero3.optimizer.grad_norm import NormPlan
from lightning_zero3.plan.structure import (
    Bucket,
    Collectives,
    Dtypes,
    NormReduction,
    PersistentGather,
    PlannedParameter,
    Structure,
)

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def structure_of(module: nn.Module, optimizer: Any, *, model_parameters: int) -> Structure:
    """Read a Structure from an engine.

    Args:
        module: The engine's module.
        optimizer: Its ``FastStage3Optimizer``.
        model_parameters: Elements of the whole model, which the engine no longer knows.
    """
    import deepspeed

    where = {id(p): index for index, group in enumerate(optimizer.fp16_groups) for p in group}
    persistent = {id(p) for p in optimizer.persistent_parameters}
    parameters = tuple(
        _parameter(name, p, where.get(id(p)), id(p) in persistent) for name, p in module.named_parameters()
    )
    flats = [flat for flat in optimizer.fp16_partitioned_groups_flat if flat is not None]
    gathers = _persistent_gathers(optimizer)
    return Structure(
        deepspeed=deepspeed.__version__,
        model_parameters=model_parameters,
        parameters=parameters,
        sub_groups=tuple(sum(p.partition_numel() for p in group) for group in optimizer.fp16_groups),
        elements_per_rank=sum(flat.numel() for flat in flats),
        optimizer_groups=len(optimizer.optimizer.param_groups),
        dtypes=Dtypes(
            weights=_NAMES[optimizer.dtype],
            masters=_NAMES[optimizer.master_weights_and_grads_dtype],
            states=_NAMES[_states_dtype(optimizer)],
            gradients=_NAMES[optimizer.grad_partitions_flat_buffer.dtype],
            reductions=_NAMES[optimizer.communication_data_type],
        ),
        aliased=len(optimizer.aliased_sub_groups()) == len(optimizer.fp16_groups),
        masters_bytes=sum(m.numel() * m.element_size() for m in optimizer.fp32_partitioned_groups_flat),
        buckets=tuple(
            Bucket(dtype=_NAMES[dtype], elements=bucket.buffer.numel())
            for dtype, bucket in optimizer.ipg_buckets.items()
            if bucket.buffer is not None
        ),
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        norms=_norms(optimizer),
        persistent_gathers=gathers,
        gradient_clear_visits_stock=len(where) * (1 if _clears_once() else len(optimizer.fp16_groups)),
        collectives_stock=_collectives_stock(optimizer, gathers),
    )


def _parameter(name: str, parameter: Any, sub_group: int | None, persistent: bool) -> PlannedParameter:
    return PlannedParameter(
        name=name,
        shape=tuple(parameter.ds_shape),
        elements=int(parameter.ds_numel),
        partition_elements=int(parameter.partition_numel()),
        kind=_kind(name, parameter),
        group_size=torch.distributed.get_world_size(parameter.ds_process_group),
        persistent=persistent,
        sub_group=sub_group,
        requires_grad=parameter.requires_grad,
    )


def _kind(name: str, parameter: Any) -> str:
    parts = name.split(".")
    if "experts" in parts or not getattr(parameter, "allreduce", True):
        return "expert"
    return "router" if {"gate", "router"} & set(parts[-3:-1]) else "dense"


def _clears_once() -> bool:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return GRAD_CLEAR.mended(DeepSpeedZeroOptimizer_Stage3)


def _states_dtype(optimizer: Any) -> torch.dtype:
    """Moments are made like masters; DeepSpeed keeps fp32 ones of bf16 masters on the host only."""
    dtype: torch.dtype = optimizer.master_weights_and_grads_dtype
    return dtype


def _norms(optimizer: Any) -> tuple[NormReduction, ...]:
    plan = NormPlan(optimizer)
    found = []
    for groups, start, stop in plan.reductions:
        sizes = tuple(torch.distributed.get_world_size(group) for group in groups)
        found.append(NormReduction(group_sizes=sizes, sub_groups=tuple(plan.order[start:stop])))
    return tuple(found)


def _persistent_gathers(optimizer: Any) -> tuple[PersistentGather, ...]:
    members: dict[tuple[int, torch.dtype], list[Any]] = {}
    for parameter in optimizer.persistent_parameters:
        members.setdefault((id(parameter.ds_process_group), parameter.ds_tensor.dtype), []).append(parameter)
    return tuple(
        PersistentGather(
            group_size=torch.distributed.get_world_size(found[0].ds_process_group),
            dtype=_NAMES[dtype],
            parameters=len(found),
            elements=sum(int(parameter.ds_numel) for parameter in found),
        )
        for (_, dtype), found in members.items()
    )


def _collectives_stock(optimizer: Any, gathers: tuple[PersistentGather, ...]) -> Collectives:
    """One reduction per sub-group over its partition group, even of one rank, and one over each further group."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    # 0.19.8 leaves out groups of one rank.
    leaves_out = "is_parallel" in referenced_names(DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct)
    reductions = 0
    for parameters in optimizer.fp16_groups:
        group = optimizer._get_param_partition_group(parameters[0])
        every_rank = getattr(optimizer, "_grad_norm_counts_every_rank", lambda *_: False)(parameters, group)
        further = [
            None if every_rank else optimizer.model_parallel_group,
            optimizer._autoep_expert_parallel_group(parameters),
        ]
        reductions += 1 + sum(
            other is not None and not (leaves_out and torch.distributed.get_world_size(other) == 1) for other in further
        )
    return Collectives(
        all_reduce=reductions, all_gather=sum(gather.parameters for gather in gathers if gather.group_size > 1)
    )
