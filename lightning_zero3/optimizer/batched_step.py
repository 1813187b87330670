# SPDX-License-Identifier: Apache-2.0
"""One update for as many sub-groups as memory allows, within upstream's ``step``.

Upstream's ``step`` stays as it is and goes on calling a handful of methods per sub-group. Here these do nothing, and
the last sub-group's turn updates all: gradients are read as slices of the flat gradient buffer, cast and scaled in one
go, the optimizer is called once per chunk and set of hyper-parameters, and weights are copied back together and bound
again only where they aren't.

Upstream symbols (0.19.7, 0.19.8): ``_prepare_sub_group``, ``unscale_and_clip_grads``, ``_optimizer_step``,
``_reassign_or_swap_out_partitioned_parameters``, ``_release_sub_group`` of ``DeepSpeedZeroOptimizer_Stage3``, which
``step`` calls in this order for one sub-group after the other. That order is checked before anything is built, by
:data:`lightning_zero3.capabilities.fixes.BATCHED_STEP`. Expires when upstream merges its updates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero3.capabilities.fixes import clears_once_per_step
from lightning_zero3.optimizer.flat_layout import FlatLayout
from lightning_zero3.optimizer.merged_update import MergedUpdate, changes_gradients, mergeable, working_memory
from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.runs import RunRules, Unit, as_one, lie_together
from lightning_zero3.optimizer.step_memory import Scratch, WorkingMemory, idle_bytes, stock_peak
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.optimizer.upstream_path import reason_for_upstreams_step


@dataclass(frozen=True)
class Chunk:
    """Consecutive sub-groups that are updated together.

    Args:
        sub_groups: Which.
        copied: Those whose gradients are copied before they are scaled; the others' are used where they lie.
        start: Where the copied ones begin in the flat gradient buffer, in elements, if they are one piece of it.
        numel: Elements of the copies.
    """

    sub_groups: range
    copied: tuple[int, ...]
    start: int | None
    numel: int


@dataclass(frozen=True)
class StepPlan:
    """How a step is cut up, for as long as the idle memory and what the optimizer allocates stay as they are.

    Args:
        chunks: What is updated together.
        rules: Which sub-groups may be updated as one tensor.
        copies: Elements of the largest chunk's copies.
        to_spare: Bytes that may be allocated beside them.
    """

    chunks: list[Chunk]
    rules: RunRules
    copies: int
    to_spare: int


class BatchOptimizerStep(OptimizerPart):
    """Mixin over a Stage-3 optimizer: upstream's loop over sub-groups ends in one update of all of them."""

    switches: Switches
    optimizer: torch.optim.Optimizer
    fp16_groups: list[list[torch.nn.Parameter]]
    fp16_partitioned_groups: list[list[torch.Tensor]]
    fp16_partitioned_groups_flat: list[torch.Tensor | None]
    fp32_partitioned_groups_flat: list[torch.Tensor]
    grad_partitions_flat_buffer: torch.Tensor
    lp_param_buffer: torch.Tensor
    averaged_gradients: dict[int, Any]
    clip_grad: float
    loss_scale: float
    # Calls to the optimizer in the last merged step, and the chunks that it was cut into.
    optimizer_calls = 0
    step_chunks = 0
    # Tensors in these calls: sub-groups that lie together count once.
    updated_tensors = 0
    _merging = False
    _total_norm: Any = None
    _layouts: tuple[FlatLayout, FlatLayout] | None = None
    _update: MergedUpdate | None = None
    _plans: dict[Any, StepPlan] | None = None
    _stock_peak: int | None = None
    _said: frozenset[str] = frozenset()

    # ---- upstream's calls, in the order in which step makes them for each sub-group

    def _prepare_sub_group(self, sub_group_id: int, *arguments: Any) -> None:
        if sub_group_id == 0:
            self._merging = self._can_merge()
        if not self._merging:
            super()._prepare_sub_group(sub_group_id, *arguments)
        elif sub_group_id == 0 and not _upstream_clears_once():
            # Up to 0.19.7 the preparation that is left out here is what clears the model's gradients.
            self.zero_grad(set_to_none=True)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """As upstream's: divide a sub-group's gradients by the loss scale and the clipping factor.

        Args:
            sub_group_id: Which sub-group.
            total_norm: The norm of all gradients, still multiplied by the loss scale.
        """
        if not self._merging:
            super().unscale_and_clip_grads(sub_group_id, total_norm)
        else:
            self._total_norm = total_norm  # the same for every sub-group

    def _optimizer_step(self, sub_group_id: int) -> None:
        if not self._merging:
            super()._optimizer_step(sub_group_id)
        elif sub_group_id == len(self.fp16_groups) - 1:
            self._update_all()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if not self._merging:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, *arguments: Any) -> None:
        if not self._merging:
            super()._release_sub_group(sub_group_id, *arguments)
        elif sub_group_id == len(self.fp16_groups) - 1:
            self._merging = False

    # ---- what may be used

    def scratch_bytes_allowed(self) -> int:
        """Bytes that a phase of the step may allocate and let go of without raising stock's peak.

        With ``step_bytes_budget``, at least that.
        """
        if self._stock_peak is None:
            self._stock_peak = stock_peak(self, self._working_memory)
        return max(self._stock_peak, self.switches.step_bytes_budget or 0)

    def gather_bytes_allowed(self, gathered: int) -> int:
        """Bytes that packing the persistent parameters may allocate, next to the gathered parameters themselves.

        Args:
            gathered: Bytes of the gathered parameters, which stock has too.
        """
        return max(self.scratch_bytes_allowed() - gathered, self.switches.step_bytes_budget or 0)

    def _working_memory(self, sub_group_id: int) -> WorkingMemory:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        return working_memory(self.optimizer, group, self.fp32_partitioned_groups_flat[0].device)

    def _can_merge(self) -> bool:
        """Whether this step's update may be merged; whatever speaks against it is said once."""
        if not self.switches.batch_optimizer_step:
            return False
        reason = reason_for_upstreams_step(self) or mergeable(self.optimizer)
        if reason is not None and reason not in self._said:
            self._said |= {reason}
            rank_zero_info(f"zero3_fast: the optimizer is called once per sub-group, as in stock: {reason}.")
        return reason is None and self._gradients_are_the_buffer()

    def _gradients_are_the_buffer(self) -> bool:
        """Whether every gradient is its place in the flat buffer; a parameter frozen since then has zeros instead."""
        buffer, gradients = self.grad_partitions_flat_buffer, self.averaged_gradients
        if self._layouts is None:
            self._layouts = FlatLayout(self.fp16_groups), FlatLayout(self.fp16_groups)
        every = itertools.chain.from_iterable(gradients[index] for index in range(len(self.fp16_groups)))
        return gradients[0][0].dtype == buffer.dtype and self._layouts[0].holds(buffer, every)

    # ---- the update

    @torch.no_grad()
    def _update_all(self) -> None:
        masters = self.fp32_partitioned_groups_flat
        if self._update is None or self._update.optimizer is not self.optimizer:
            self._update = MergedUpdate(self.optimizer, masters, self.sub_group_to_group_id.__getitem__)
            self._plans = {}
        factor = self._factor()
        idle = idle_bytes(self)
        plan = self._plan(factor is not None, idle)

        def memory(wanted: int) -> Scratch | None:
            fits = wanted <= max(plan.to_spare, 0 if idle is None else idle.numel())
            return Scratch(idle, wanted, masters[0].device) if fits else None

        # Before gradients are copied: what is brought together goes through the same memory.
        calls = [self._update.plan(chunk.sub_groups, plan.rules, memory) for chunk in plan.chunks]
        units = [[unit for _, of_call in of_chunk for unit in of_call] for of_chunk in calls]
        self.step_chunks = len(plan.chunks)
        self.optimizer_calls = sum(map(len, calls))
        self.updated_tensors = sum(map(len, units))
        scratch = None
        if plan.copies:
            wanted = plan.copies * masters[0].element_size()
            scratch = Scratch(idle, wanted, masters[0].device).take(plan.copies, masters[0].dtype)
        for chunk, of_chunk, together in zip(plan.chunks, calls, units, strict=True):
            self._set_gradients(chunk, together, factor, scratch)
            self._update.step(of_chunk)
            for unit in together:
                unit.tensor.grad = None
        self._copy_weights_back(itertools.chain.from_iterable(units))
        self._let_go_of_gradients()

    def _factor(self) -> Any:
        """What gradients are multiplied by: upstream's arithmetic, to the bit; None where it is 1."""
        combined_scale: Any = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((self._total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * self.loss_scale
        elif combined_scale == 1.0:
            return None
        return 1.0 / combined_scale

    def _set_gradients(self, chunk: Chunk, units: Sequence[Unit], factor: Any, scratch: torch.Tensor | None) -> None:
        assert self._layouts is not None
        buffer, spans = self.grad_partitions_flat_buffer, self._layouts[0].spans
        # Where each copied sub-group's gradient starts in the copies.
        starts: dict[int, int] = {}
        if chunk.copied:
            assert scratch is not None
            whole = scratch.narrow(0, 0, chunk.numel)
            sizes = [spans[index][1] - spans[index][0] for index in chunk.copied]
            starts = dict(zip(chunk.copied, itertools.accumulate(sizes, initial=0), strict=False))
            if chunk.start is not None:
                whole.copy_(buffer.narrow(0, chunk.start, chunk.numel))
            else:
                places = [buffer[slice(*spans[index])] for index in chunk.copied]
                torch._foreach_copy_(list(whole.split(sizes)), places)
            if factor is not None:
                whole.mul_(factor)
        in_place = []
        for unit in units:
            first, last = unit.members[0], unit.members[-1]
            numel = spans[last][1] - spans[first][0]
            if first in starts:
                unit.tensor.grad = whole.narrow(0, starts[first], numel)
            else:
                unit.tensor.grad = buffer.narrow(0, spans[first][0], numel)
                in_place.append(unit.tensor.grad)
        if factor is not None and in_place:
            torch._foreach_mul_(in_place, factor)

    def _plan(self, scaled: bool, idle: torch.Tensor | None) -> StepPlan:
        plans, masters = self._plans, self.fp32_partitioned_groups_flat
        assert plans is not None
        idle_size = 0 if idle is None else idle.numel()
        device = masters[0].device
        needs = frozenset(working_memory(self.optimizer, group, device) for group in self.optimizer.param_groups)
        key = (scaled, idle_size, needs)
        if key not in plans:
            copied = [self._is_copied(index, scaled) for index in range(len(masters))]
            chunks = self._cut(copied, idle_size, needs)
            copies = max(chunk.numel for chunk in chunks)
            beside = copies * masters[0].element_size()
            beside = 0 if idle_size >= beside else beside
            rules = RunRules(self._most_in_a_loop(needs, beside), copied, self._has_its_own_master)
            plans[key] = StepPlan(chunks, rules, copies, self.scratch_bytes_allowed() - beside)
        return plans[key]

    def _has_its_own_master(self, sub_group_id: int) -> bool:
        weights = self.fp16_partitioned_groups_flat[sub_group_id]
        return weights is not self.fp32_partitioned_groups_flat[sub_group_id]

    def _cut(self, copied: Sequence[bool], idle: int, needs: Collection[WorkingMemory]) -> list[Chunk]:
        """Cut the sub-groups into chunks: by bytes of copied gradients, and by what the optimizer allocates."""
        masters = self.fp32_partitioned_groups_flat
        size = masters[0].element_size()
        largest = size * max(master.numel() for master in masters)
        budget = self.switches.step_bytes_budget
        # Automatic: idle memory if there is enough; else what stock's copy of the largest sub-group takes.
        for_copies = budget if budget is not None else idle if idle >= largest else largest
        from_idle = idle >= for_copies
        per_call = max(need.per_call for need in needs)
        # A loop keeps its result for one tensor until it has the next one's; a large one is called for by itself.
        alone = self._most_in_a_loop(needs, 0 if from_idle else for_copies)
        if budget is not None:
            for_all: float = budget
        elif per_call:
            for_all = (self.scratch_bytes_allowed() - (0 if from_idle else for_copies)) / per_call
        else:
            for_all = float("inf")
        chunks: list[Chunk] = []
        first, bytes_copied, bytes_all, before = 0, 0, 0, 0
        for index, master in enumerate(masters):
            more = size * master.numel()
            more_copied = more if copied[index] else 0
            full = bytes_copied + more_copied > for_copies or bytes_all + more > for_all
            if index > first and (full or max(before, more) > alone):
                chunks.append(self._chunk(range(first, index), copied))
                first, bytes_copied, bytes_all = index, 0, 0
            bytes_copied += more_copied
            bytes_all += more
            before = more
        chunks.append(self._chunk(range(first, len(masters)), copied))
        return chunks

    def _most_in_a_loop(self, needs: Iterable[WorkingMemory], scratch: int) -> float:
        """Bytes of a tensor that may be one of several in a call to an optimizer that loops over them."""
        per_tensor = max(need.per_tensor for need in needs)
        if self.switches.step_bytes_budget is not None:
            return self.switches.step_bytes_budget
        return (self.scratch_bytes_allowed() - scratch) / (per_tensor + 1) if per_tensor else float("inf")

    def _is_copied(self, sub_group_id: int, scaled: bool) -> bool:
        """Whether stock works on a copy of a sub-group's gradients, and that copy differs from them.

        Where it casts, and where it scales gradients of several parameters. A single parameter's gradient is flattened
        to itself, so stock scales it in place.
        """
        if self.grad_partitions_flat_buffer.dtype != self.fp32_partitioned_groups_flat[sub_group_id].dtype:
            return True
        several = len(self.fp16_groups[sub_group_id]) > 1
        return several and (scaled or changes_gradients(self.optimizer))

    def _chunk(self, sub_groups: range, copied: Sequence[bool]) -> Chunk:
        assert self._layouts is not None
        spans = self._layouts[0].spans
        chosen = tuple(index for index in sub_groups if copied[index])
        one_piece = bool(chosen) and chosen[-1] - chosen[0] == len(chosen) - 1
        numel = sum(spans[index][1] - spans[index][0] for index in chosen)
        return Chunk(sub_groups, chosen, spans[chosen[0]][0] if one_piece else None, numel)

    def _copy_weights_back(self, units: Iterable[Unit]) -> None:
        """Masters into weights, where they are two tensors; bind the partitions again where they aren't bound."""
        assert self._layouts is not None
        weights, masters = self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat
        into: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for unit in units:
            # None stands for weights on NVMe, which this step doesn't know.
            apart = [w for i in unit.members if (w := weights[i]) is not None and w is not masters[i]]
            if len(unit.members) > 1 and len(apart) == len(unit.members) and lie_together(apart):
                into.append(as_one(apart))
                source.append(unit.tensor)
            else:
                into += [weight.data for weight in apart]
                source += [masters[i].data for i in unit.members if weights[i] is not masters[i]]
        if into:
            torch._foreach_copy_(into, source)
        partitions = itertools.chain.from_iterable(self.fp16_partitioned_groups)
        if not self._layouts[1].holds(self.lp_param_buffer, partitions):
            for index in range(len(weights)):
                self._unflatten_partitioned_parameters(index)

    def _let_go_of_gradients(self) -> None:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_synchronized_device():
            # Gradients were reduced on another stream; all of them are this one buffer.
            self.grad_partitions_flat_buffer.record_stream(get_accelerator().current_stream())
        for index in range(len(self.fp16_groups)):
            self.averaged_gradients[index] = None


@functools.cache
def _upstream_clears_once() -> bool:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return clears_once_per_step(DeepSpeedZeroOptimizer_Stage3)
