# SPDX-License-Identifier: Apache-2.0
"""Persistent parameters are gathered after the step by one collective per process group and dtype.

Upstream symbol: ``DeepSpeedZeroOptimizer_Stage3._post_step``, whose ``all_gather`` of the persistent parameters
launches one collective for each of them (``Init._allgather_params_coalesced``; 0.19.7, 0.19.8). Expires when upstream
packs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.step_memory import Scratch, idle_bytes
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.optimizer.upstream_path import reason_for_upstreams_step


@dataclass(frozen=True)
class _Shelf:
    """Parameters of one shape in a packed gather.

    Args:
        parameters: In the order in which their partitions are packed.
        partition: Elements of one parameter's partition, padding included.
        numel: Elements of the whole parameter.
        shape: Its shape.
    """

    parameters: tuple[Any, ...]
    partition: int
    numel: int
    shape: tuple[int, ...]


class CoalescePersistentGather(OptimizerPart):
    """Mixin over a Stage-3 optimizer: packs what upstream gathers one by one."""

    switches: Switches
    persistent_parameters: Sequence[Any]
    _gather_plan: tuple[int, list[tuple[Any, torch.dtype, list[_Shelf]]]] | None = None

    def _post_step(self, *arguments: Any) -> None:
        if self.switches.coalesce_persistent_gather and reason_for_upstreams_step(self) is None:
            self._gather_persistent()
        super()._post_step(*arguments)

    def _gather_persistent(self) -> None:
        """Gather the persistent parameters that aren't gathered; upstream then finds nothing to do."""
        from deepspeed import comm as dist
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        missing = [p for p in self.persistent_parameters if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if not missing:
            return
        if self._gather_plan is None or self._gather_plan[0] != len(missing):
            self._gather_plan = (len(missing), _plan(missing))
        elif len(missing) != len(self.persistent_parameters):
            self._gather_plan = (len(missing), _plan(missing))  # as many, but maybe others
        for group, dtype, shelves in self._gather_plan[1]:
            ranks = dist.get_world_size(group=group)
            if ranks == 1:
                for shelf in shelves:
                    for parameter in shelf.parameters:
                        parameter.data = parameter.ds_tensor.data.view(shelf.shape)
                        parameter.ds_status = ZeroParamStatus.AVAILABLE
            elif (memory := self._memory_to_pack(shelves, dtype, ranks)) is not None:
                _gather(shelves, group, ranks, memory)
                for shelf in shelves:
                    for parameter in shelf.parameters:
                        parameter.ds_status = ZeroParamStatus.AVAILABLE

    def _memory_to_pack(self, shelves: list[_Shelf], dtype: torch.dtype, ranks: int) -> Scratch | None:
        """Memory for the packed parts of this rank and of all ranks, next to the gathered parameters themselves.

        Idle memory where it suffices, else as much as the step's peak leaves. Few and small parameters persist by
        default; where a user lets a whole model persist and neither suffices, upstream's gather needs less: None.
        """
        wanted = sum(len(shelf.parameters) * shelf.partition for shelf in shelves) * dtype.itemsize * (ranks + 1)
        gathered = wanted // (ranks + 1) * ranks
        idle = idle_bytes(self)
        fits = idle is not None and wanted <= idle.numel()
        if not fits and wanted > self.gather_bytes_allowed(gathered):
            return None
        return Scratch(idle, wanted, shelves[0].parameters[0].ds_tensor.device)


def _plan(parameters: list[Any]) -> list[tuple[Any, torch.dtype, list[_Shelf]]]:
    """Parameters by process group and dtype, in upstream's order of groups; within each, by shape."""
    by_group: dict[tuple[int, torch.dtype], tuple[Any, list[Any]]] = {}
    for parameter in parameters:
        partition = parameter.ds_tensor
        # What upstream would dequantize or fetch from elsewhere stays with it.
        if hasattr(partition, "ds_quant_scale") or partition.device != parameter.device:
            continue
        group = parameter.ds_process_group
        by_group.setdefault((id(group), partition.dtype), (group, []))[1].append(parameter)
    plan = []
    for (_, dtype), (group, members) in by_group.items():
        # A stable sort on sizes and shapes, which are the same on all ranks.
        members.sort(key=_shape_of)
        shelves = [
            _Shelf(tuple(same), partition, numel, shape)
            for (partition, numel, shape), same in itertools.groupby(members, key=_shape_of)
        ]
        plan.append((group, dtype, shelves))
    return plan


def _shape_of(parameter: Any) -> tuple[int, int, tuple[int, ...]]:
    return parameter.ds_tensor.numel(), parameter.ds_numel, tuple(parameter.ds_shape)


def _gather(shelves: list[_Shelf], group: Any, ranks: int, memory: Scratch) -> None:
    """One all-gather; then each parameter's parts, which lie one rank apart, are put side by side.

    Args:
        shelves: What to gather; all partitions have one dtype.
        group: The process group.
        ranks: Its size.
        memory: For this rank's parts and all ranks' parts.
    """
    from deepspeed import comm as dist

    parts = [parameter.ds_tensor for shelf in shelves for parameter in shelf.parameters]
    count, dtype = sum(part.numel() for part in parts), parts[0].dtype
    local, by_rank = memory.take(count, dtype), memory.take(ranks * count, dtype)
    torch.cat(parts, out=local)
    dist.all_gather_into_tensor(by_rank, local, group=group)
    by_rank = by_rank.view(ranks, -1)
    whole = torch.empty(by_rank.numel(), dtype=dtype, device=local.device)
    start = 0
    for shelf in shelves:
        count, part = len(shelf.parameters), shelf.partition
        stop = start + count * part
        rows = whole[start * ranks : stop * ranks].view(count, ranks, part)
        rows.copy_(by_rank[:, start:stop].view(ranks, count, part).transpose(0, 1))
        # Without the padding behind the last rank's part.
        values = rows.view(count, -1)[:, : shelf.numel].view(count, *shelf.shape)
        for parameter, value in zip(shelf.parameters, values.unbind(), strict=True):
            parameter.data = value
        start = stop
