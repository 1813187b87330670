# SPDX-License-Identifier: Apache-2.0
"""One optimizer call for many sub-groups: which optimizers allow it, and how their parameter groups are put together.

Stock calls the optimizer once per sub-group, with that sub-group's master in its parameter group and all other groups
empty. Optimizers that walk all their groups (torch's) then make sub-groups × groups visits, and AutoEP makes one group
per expert tensor. An optimizer that treats each tensor for itself gives the same values for all of them in one call, as
long as they share their hyper-parameters.

Upstream symbols, read: ``_optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks`` of torch's optimizers (torch
2.8 to 2.13), since a hook would see one call in place of many. A missing name raises. Expires when torch tells of
hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from lightning_zero3.optimizer.runs import Memory, RunRules, Runs, Unit
from lightning_zero3.optimizer.step_memory import WorkingMemory


def mergeable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer has to be called per sub-group, or None.

    Known classes only, by exact type: a subclass may mix tensors. A hook on its steps would run less often.

    Args:
        optimizer: The optimizer that DeepSpeed's Stage-3 optimizer wraps.
    """
    if type(optimizer) not in _known_classes():
        return (
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} isn't known to treat each tensor for itself"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "hooks are registered on the optimizer's step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return None


def _known_classes() -> tuple[type[Any], ...]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    return (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, FusedAdam, DeepSpeedCPUAdam)


def _is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    from deepspeed.ops.adam import FusedAdam

    return type(optimizer) is FusedAdam


def working_memory(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> WorkingMemory:
    """What a known optimizer allocates while it updates the tensors of a parameter group.

    Args:
        optimizer: Of a class that :func:`mergeable` allows, or another: then nothing is assumed.
        group: A parameter group.
        device: Where the masters are; torch's default implementation depends on it.

    Returns:
        Lower bounds for loops, the whole for foreach implementations (torch 2.8 to 2.13): Adam has the denominator,
        SGD the decayed gradient.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or group.get("fused"):
        return WorkingMemory()
    adam = type(optimizer) is not torch.optim.SGD
    copies = 1 if adam or group["weight_decay"] or group["maximize"] else 0
    foreach = group.get("foreach")
    if foreach or (foreach is None and device.type != "cpu"):
        return WorkingMemory(per_call=copies)
    return WorkingMemory(per_tensor=2 if adam else copies)


def changes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update may write into the gradients that it is given: torch's foreach SGD with Nesterov momentum.

    Args:
        optimizer: Of a class that :func:`mergeable` allows.
    """
    return any(group.get("nesterov") for group in optimizer.param_groups)


class MergedUpdate:
    """Calls an optimizer once per distinct set of hyper-parameters.

    Args:
        optimizer: Of a class that :func:`mergeable` allows.
        masters: All sub-groups' masters.
        group_of: Parameter group of each sub-group (upstream's ``sub_group_to_group_id``).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor], group_of: Callable[[int], int]
    ) -> None:
        self.optimizer = optimizer
        self._masters = masters
        self._runs = Runs(optimizer, masters)
        self._group_of = group_of
        # A known class reads the keys of its defaults; FusedAdam takes a new tensor's count of steps from its group.
        self._keys = tuple(optimizer.defaults)
        self._read = itemgetter(*self._keys)
        self._counts_per_tensor = _is_fused_adam(optimizer)

    def buckets(self, sub_groups: Iterable[int]) -> list[tuple[Any, list[int]]]:
        """Put sub-groups together whose hyper-parameters are equal at this moment.

        Args:
            sub_groups: Which.

        Returns:
            Pairs of a parameter group, whose hyper-parameters hold for all, and sub-groups.
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state
        seen: dict[int, Any] = {}
        found: dict[Any, tuple[Any, list[int]]] = {}
        for index in sub_groups:
            group_id = self._group_of(index)
            key = seen.get(group_id)
            if key is None:
                key = seen[group_id] = self._hyper_parameters(groups[group_id])
            if self._counts_per_tensor:
                known = state.get(self._masters[index])
                key = (key, known["step"] if known else groups[group_id].get("step", 0))
            bucket = found.get(key)
            if bucket is None:
                found[key] = (groups[group_id], [index])
            else:
                bucket[1].append(index)
        return list(found.values())

    def plan(self, sub_groups: Iterable[int], rules: RunRules, memory: Memory) -> list[tuple[Any, list[Unit]]]:
        """What each call will update, before any gradient is set.

        Args:
            sub_groups: Which, ascending.
            rules: Which of them may be updated as one tensor.
            memory: What apart tensors are brought together through.

        Returns:
            For each call, the parameter group whose hyper-parameters hold for all, and what is updated.
        """
        return [(group, self._runs.units(members, rules, memory)) for group, members in self.buckets(sub_groups)]

    def step(self, calls: Sequence[tuple[Any, list[Unit]]]) -> None:
        """Update the masters; each unit's tensor has its ``grad`` set.

        Args:
            calls: From :meth:`plan`.
        """
        optimizer, every_group = self.optimizer, self.optimizer.param_groups
        units: list[Unit] = []
        try:
            for group, units in calls:
                tensors = [unit.tensor for unit in units]
                for unit in units:
                    if unit.state:
                        optimizer.state[unit.tensor] = dict(unit.state)
                # The other groups are empty in every call anyway, so it needn't see them.
                optimizer.param_groups = [{**group, "params": tensors}]
                optimizer.step()
                if self._counts_per_tensor:
                    self._count_all(tensors)
                self._runs.spread(units)
        finally:
            optimizer.param_groups = every_group
            for unit in units:
                # After an exception in a call: a key that no group has would make state_dict() fail.
                if unit.state is not None:
                    optimizer.state.pop(unit.tensor, None)
        if self._counts_per_tensor:
            for group in every_group:
                group.setdefault("step", 0)  # as FusedAdam leaves it in every group that it has stepped

    def _count_all(self, tensors: list[torch.Tensor]) -> None:
        """FusedAdam advances the last tensor's count of steps only, as if each call had one tensor."""
        state = self.optimizer.state
        count = state[tensors[-1]]["step"]
        for tensor in tensors:
            state[tensor]["step"] = count

    def _hyper_parameters(self, group: dict[str, Any]) -> Any:
        try:
            values = self._read(group)
        except KeyError:
            # torch adds to the defaults when it loads a state, not to DeepSpeed's groups.
            values = tuple(group.get(key) for key in self._keys)
        try:
            hash(values)
        except TypeError:
            values = tuple(tuple(value) if isinstance(value, list) else value for value in values)
        # A tensor is hashed, and so compared, by identity: groups share it or are kept apart.
        return values
