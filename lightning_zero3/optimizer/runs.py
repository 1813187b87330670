# SPDX-License-Identifier: Apache-2.0
"""Runs: consecutive sub-groups that lie one behind the other in memory, and are updated as one tensor.

The optimizers that are merged treat each element for itself, so a tensor and its pieces are updated to the same bits,
and 137 sub-groups cost a handful of tensors' host time. Masters and moments that lie apart are brought together once,
by way of memory that is idle during the step, so nothing is ever there twice. What can't be brought together is
updated tensor by tensor.

The tensors that DeepSpeed and the optimizer's state know keep their identity and become views of one storage, so
checkpoints, edits and offloads find them where they always are. Nothing here holds on to a storage between steps:
whoever moves a tensor elsewhere frees what it leaves, and the next step finds that it lies apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero3.optimizer.step_memory import Scratch

# Vector kernels for CPUs treat a tensor's last elements by scalar code, whose last bit may differ; a sub-group inside a
# run has no such rest. 64 elements are more than any vector that they use at a time.
_WHOLE_VECTORS = 64


@dataclass
class Unit:
    """What the optimizer updates as one tensor: a sub-group, or a run of several.

    Args:
        members: Sub-groups, consecutive.
        tensor: The master, or a view of all masters.
        state: The optimizer's state for a run, as views of its members' states; None for a single master, whose state
            is where it always is.
    """

    members: Sequence[int]
    tensor: torch.Tensor
    state: dict[str, Any] | None = None


# Bytes → memory to copy through, or None where there is none.
Memory = Callable[[int], Scratch | None]


@dataclass(frozen=True, eq=False)
class RunRules:
    """Which sub-groups may be in one run. Made once for many steps, and known by identity.

    Args:
        max_bytes: Bytes of masters in one run; a single sub-group may have more.
        copied: Per sub-group, whether its gradients are copied; copies and originals don't lie together.
        movable: Per sub-group, whether its master may be given other storage (an alias' may not).
    """

    max_bytes: float
    copied: Sequence[bool]
    movable: Callable[[int], bool]


@dataclass
class Runs:
    """Finds runs among sub-groups and brings their tensors together.

    Args:
        optimizer: A ``torch.optim.Optimizer`` of a known class.
        masters: All sub-groups' masters.
    """

    optimizer: Any
    masters: Sequence[torch.Tensor]
    _candidates: dict[Any, list[list[int]]] = field(default_factory=dict)

    def units(self, members: Sequence[int], rules: RunRules, memory: Memory) -> list[Unit]:
        """Sub-groups of one set of hyper-parameters, as runs where they lie together or can be brought to.

        Args:
            members: Which, ascending.
            rules: Which of them may be in one run.
            memory: What apart tensors are brought together through.
        """
        key = (tuple(members), rules)
        if key not in self._candidates:
            self._candidates[key] = self._split(members, rules)
        found: list[Unit] = []
        for candidate in self._candidates[key]:
            run = self._join(candidate, rules, memory) if len(candidate) > 1 else None
            found += [run] if run is not None else [Unit([index], self.masters[index]) for index in candidate]
        return found

    def spread(self, units: Sequence[Unit]) -> None:
        """Give each sub-group its part of what the optimizer has left in its state for a run."""
        for unit in units:
            if unit.state is None:
                continue
            # SGD without momentum keeps none.
            after = self.optimizer.state.pop(unit.tensor, {})
            numels = [self.masters[index].numel() for index in unit.members]
            for name, value in after.items():
                before = unit.state.get(name)
                if torch.is_tensor(value) and value.shape == unit.tensor.shape:
                    if before is None or before.data_ptr() != value.data_ptr():
                        self._put(unit.members, name, value.split(numels))
                elif torch.is_tensor(value):
                    # A count of steps, one for each sub-group.
                    if before is None:
                        counts = value.repeat(len(numels))
                        self._put(unit.members, name, counts.unbind())
                    else:
                        value.as_strided((len(numels),), (1,)).copy_(value.clone().expand(len(numels)))
                else:
                    self._put(unit.members, name, [value] * len(numels))

    def _put(self, members: Sequence[int], name: str, values: Sequence[Any]) -> None:
        for index, value in zip(members, values, strict=True):
            self.optimizer.state[self.masters[index]][name] = value

    def _split(self, members: Sequence[int], rules: RunRules) -> list[list[int]]:
        """Candidates, by what doesn't change from step to step."""
        found: list[list[int]] = []
        size = 0
        previous = None
        for index in members:
            master = self.masters[index]
            more = master.numel() * master.element_size()
            goes_on = (
                previous is not None
                and index == previous + 1
                and rules.copied[index] == rules.copied[previous]
                and size + more <= rules.max_bytes
                and (master.device.type != "cpu" or self.masters[previous].numel() % _WHOLE_VECTORS == 0)
            )
            if goes_on:
                found[-1].append(index)
                size += more
            else:
                found.append([index])
                size = more
            previous = index
        return found

    def _join(self, members: Sequence[int], rules: RunRules, memory: Memory) -> Unit | None:
        """The members as one tensor with one state, or None where they have to be updated one by one."""
        masters = [self.masters[index] for index in members]
        states = [self.optimizer.state.get(master) or {} for master in masters]
        names = states[0].keys()
        if any(state.keys() != names for state in states[1:]):
            return None
        state: dict[str, Any] = {}
        for name in names:
            values = [entry[name] for entry in states]
            if not torch.is_tensor(values[0]):
                # The same number for all, as FusedAdam's count of steps.
                if any(value != values[0] for value in values[1:]):
                    return None
                state[name] = values[0]
                continue
            if not all(map(torch.is_tensor, values)):
                return None
            if values[0].ndim == 0:
                joined = _join_counts(values)
            elif all(value.numel() == master.numel() for value, master in zip(values, masters, strict=True)):
                joined = _join_vectors(values, memory)
            else:
                return None
            if joined is None:
                return None
            state[name] = joined
        movable = all(map(rules.movable, members))
        whole = _join_vectors(masters, memory if movable else None)
        return None if whole is None else Unit(members, whole, state)


def _join_vectors(tensors: Sequence[torch.Tensor], memory: Memory | None) -> Any:
    """One view of tensors that lie together, after bringing them together if there is memory to do that; or None."""
    if not lie_together(tensors) and (memory is None or not _bring_together(tensors, memory)):
        return None
    return as_one(tensors)


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One view of tensors that lie together, 1-D, outside of autograd."""
    return tensors[0].detach().as_strided((sum(map(torch.Tensor.numel, tensors)),), (1,))


def _join_counts(counts: Sequence[torch.Tensor]) -> Any:
    """The first of equal counts that lie together, after bringing them together; None where they differ.

    Only counts on the host are looked at: to compare others would be to wait for their device. One that several states
    share, as a load may leave it, can't lie in several places.
    """
    first = counts[0]
    if len(set(map(id, counts))) < len(counts):
        return None
    if any(count.device.type != "cpu" or count.ndim or count.dtype is not first.dtype for count in counts):
        return None
    if not lie_together(counts):
        together = torch.stack([count.detach() for count in counts])
        for count, place in zip(counts, together.unbind(), strict=True):
            count.data = place
    every = as_one(counts)
    return first if bool((every == every[0]).all()) else None


def lie_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors lie one behind the other in the first one's storage."""
    first = tensors[0]
    size = first.element_size()
    ends = list(itertools.accumulate((tensor.numel() * size for tensor in tensors), initial=first.data_ptr()))
    if list(map(torch.Tensor.data_ptr, tensors)) != ends[:-1]:
        return False
    if any(tensor.dtype is not first.dtype or not tensor.is_contiguous() for tensor in tensors):
        return False
    # Separate storages may happen to be neighbours.
    return ends[-1] - first.untyped_storage().data_ptr() <= first.untyped_storage().nbytes()


def _bring_together(tensors: Sequence[torch.Tensor], memory: Memory) -> bool:
    """Give tensors one storage, by way of other memory, so that no tensor is there twice while that happens."""
    first = tensors[0]
    if any(tensor.dtype is not first.dtype or tensor.device != first.device for tensor in tensors):
        return False
    numels = [tensor.numel() for tensor in tensors]
    through = memory(sum(numels) * first.element_size())
    if through is None:
        return False
    copies = through.take(sum(numels), first.dtype)
    torch.cat([tensor.detach().view(-1) for tensor in tensors], out=copies)
    pieces = copies.split(numels)
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=first.dtype, device=first.device)
    try:
        together = torch.empty_like(copies)
    except torch.OutOfMemoryError:
        # There is as much as before, but not in one piece.
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.data = piece.clone()
        return False
    together.copy_(copies)
    for tensor, piece in zip(tensors, together.split(numels), strict=True):
        tensor.data = piece
    return True
