# SPDX-License-Identifier: Apache-2.0
"""Gradient norms of all sub-groups at once: one pass over the gradients, one reduction per process group.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3._get_norm_groups`` and ``get_grad_norm_direct`` (0.19.7, 0.19.8),
which compute and reduce the norm of one sub-group after the other, experts' twice. Expires when upstream reduces them
together.

Each parameter's norm, each sub-group's sum and the order within both stay upstream's, in fp64, so one and two ranks
give the same bits. With more ranks a reduction of many numbers may add the ranks' parts in another order than one of a
single number; the norm then differs by at most 4 fp64 ulps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.step_memory import Scratch, idle_bytes
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.optimizer.upstream_path import reason_for_upstreams_step

# Below this size torch's CPU norm adds up one row of a matrix in the order in which it adds up the same vector; larger
# vectors may be split among threads.
_ROW_LIMIT = 16_384
# Bytes for such rows; more gains nothing.
_ROOM_FOR_ROWS = 1 << 20


class CoalesceGradNorms(OptimizerPart):
    """Mixin over a Stage-3 optimizer, below whatever asks for the norms."""

    switches: Switches
    averaged_gradients: dict[int, Any]
    _norm_plan: NormPlan | None = None

    def _get_norm_groups(self) -> list[torch.Tensor]:
        if not self.switches.coalesce_grad_norms or reason_for_upstreams_step(self) is not None:
            norms: list[torch.Tensor] = super()._get_norm_groups()
            return norms
        from deepspeed import comm as dist

        if self._norm_plan is None:
            self._norm_plan = NormPlan(self)
        plan = self._norm_plan
        sums = plan.sums_of_squares(self.averaged_gradients, idle_bytes(self), self.scratch_bytes_allowed())
        for groups, start, stop in plan.reductions:
            part = sums[start:stop]
            for group in groups:
                dist.all_reduce(part, group=group)
        roots = sums.pow_(0.5)
        # Upstream's mark for a norm that is no finite number.
        roots.masked_fill_(roots.isfinite().logical_not_(), -1.0)
        return list(plan.in_order(roots).unbind())


class NormPlan:
    """What doesn't change from step to step: who is counted, who is reduced together, who has the same size.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer_Stage3``.
    """

    def __init__(self, optimizer: Any) -> None:
        from deepspeed import comm as dist
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.utils import is_model_parallel_parameter
        from deepspeed.runtime.zero.utils import get_norm_dtype

        self.dtype: torch.dtype = get_norm_dtype()
        self.device = torch.device(get_accelerator().current_device_name())
        # Groups to reduce over → sub-groups. Those that are reduced together stand together in the vector of sums.
        classes: dict[tuple[int, ...], tuple[list[Any], list[int]]] = {}
        counted: list[list[int]] = []
        for index, parameters in enumerate(optimizer.fp16_groups):
            optimizer._assert_same_partition_group(parameters)
            group = optimizer._get_param_partition_group(parameters[0])
            # 0.19.8: experts that lie across tensor-parallel ranks are counted by the other two groups already.
            every_rank = getattr(optimizer, "_grad_norm_counts_every_rank", lambda *_: False)(parameters, group)
            groups = [
                group,
                None if every_rank else optimizer.model_parallel_group,
                optimizer._autoep_expert_parallel_group(parameters),
            ]
            wide = [g for g in groups if g is not None and dist.get_world_size(group=g) > 1]
            classes.setdefault(tuple(map(id, wide)), (wide, []))[1].append(index)
            counted.append(
                [
                    position
                    for position, parameter in enumerate(parameters)
                    if every_rank or is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0
                ]
            )
        self.order = [index for _, members in classes.values() for index in members]
        self.reductions: list[tuple[list[Any], int, int]] = []
        start = 0
        for groups, members in classes.values():
            self.reductions.append((groups, start, start + len(members)))
            start += len(members)
        self._counted = [
            None if len(counted[index]) == len(optimizer.fp16_groups[index]) else counted[index] for index in self.order
        ]
        numels = [int(optimizer.fp16_groups[i][k].partition_numel()) for i in self.order for k in counted[i]]
        self._alike = _alike(numels, rows=self.device.type == "cpu")
        self._where = self._index([k for positions in self._alike for k in positions])
        bounds = list(itertools.accumulate((len(counted[i]) for i in self.order), initial=0))
        self._sums = self._same_count(bounds)
        self._back = None if self.order == sorted(self.order) else self._index(self.order)

    def sums_of_squares(
        self, gradients: Mapping[int, Sequence[torch.Tensor]], idle: torch.Tensor | None, allowed: int
    ) -> torch.Tensor:
        """This rank's sum of squared norms per sub-group.

        Args:
            gradients: Sub-group → its gradients.
            idle: Memory that may be overwritten, see :func:`~lightning_zero3.optimizer.step_memory.idle_bytes`.
            allowed: Bytes that may be allocated where there is no idle memory.

        Returns:
            1-D, in the norm's dtype, in the order of :attr:`reductions`.
        """
        flat: list[torch.Tensor] = []
        for index, positions in zip(self.order, self._counted, strict=True):
            of_sub_group = gradients[index]
            flat.extend(of_sub_group if positions is None else [of_sub_group[k] for k in positions])
        sums = torch.zeros(len(self.order), dtype=self.dtype, device=self.device)
        if not flat:
            return sums
        # One number per parameter, three times over, then room for gradients that are made rows of a matrix.
        count, wide = len(flat), self.dtype.itemsize
        vectors = 3 * count * wide
        room = min(max(0, allowed - vectors), _ROOM_FOR_ROWS) if self.device.type == "cpu" else 0
        memory = Scratch(idle, vectors + room, self.device)
        norms, squares, gathered = (memory.take(count, self.dtype) for _ in range(3))
        self._norms(flat, memory, out=norms)
        squares.index_copy_(0, self._where, norms.pow_(2.0))
        for members, places in self._sums:
            rows = torch.index_select(squares, 0, places.view(-1), out=gathered[: places.numel()]).view(places.shape)
            # A sum over rows adds each row up as upstream's sum of that row does.
            sums.index_copy_(0, members, rows.sum(1) if places.shape[1] > 1 else rows[:, 0])
        return sums

    def _norms(self, flat: list[torch.Tensor], memory: Scratch, out: torch.Tensor) -> None:
        """Norms in the order of ``_alike``; gradients of one small size as the rows of a matrix, on a CPU.

        Args:
            flat: All gradients that count.
            memory: What may be written to.
            out: 1-D, one number per gradient.
        """
        done = 0
        for positions in self._alike:
            numel, narrow = flat[positions[0]].numel(), flat[positions[0]].dtype
            most = min(memory.left // (numel * (self.dtype.itemsize + narrow.itemsize)), len(positions))
            if most < 2 or numel >= _ROW_LIMIT or self.device.type != "cpu":
                # As upstream's g.to(fp64).norm(2), each on its own, by as few launches as the device can.
                chosen = [flat[k].to(self.device, non_blocking=True) for k in positions]
                found = torch._foreach_norm(chosen, 2.0, dtype=self.dtype)
                torch.stack(found, out=out[done : done + len(positions)])
                done += len(positions)
                continue
            for some in _batched(positions, most):
                numbers = len(some) * numel
                with memory.lent():
                    matrix, rows = memory.take(numbers, self.dtype), memory.take(numbers, narrow)
                    picked = itemgetter(*some)(flat) if len(some) > 1 else (flat[some[0]],)
                    torch.cat(picked, out=rows)
                    matrix = matrix.copy_(rows).view(len(some), numel)
                    torch.linalg.vector_norm(matrix, 2.0, dim=1, out=out[done : done + len(some)])
                done += len(some)

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Values per sub-group, from the order of :attr:`reductions` to upstream's."""
        return values if self._back is None else torch.empty_like(values).index_copy_(0, self._back, values)

    def _same_count(self, bounds: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sub-groups with equally many counted parameters: their numbers, and per row where their squares are."""
        by_count: dict[int, list[int]] = defaultdict(list)
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            if last > first:
                by_count[last - first].append(number)
        return [
            (
                self._index(members),
                torch.stack([torch.arange(bounds[m], bounds[m] + count) for m in members]).to(self.device),
            )
            for count, members in by_count.items()
        ]

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


def _alike(numels: Sequence[int], rows: bool) -> list[list[int]]:
    """Positions by size; all in one list where rows aren't used."""
    if not rows:
        return [list(range(len(numels)))] if numels else []
    by_numel: dict[int, list[int]] = defaultdict(list)
    for position, numel in enumerate(numels):
        by_numel[numel].append(position)
    return list(by_numel.values())


def _batched(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[k : k + size] for k in range(0, len(items), size)]
