# SPDX-License-Identifier: Apache-2.0
"""A sharded checkpoint of any layout, as one: where in which rank's files each element of a whole tensor lies.

Source of the format: ``DeepSpeedEngine._save_checkpoint``, ``_save_moe_checkpoint`` and ``_save_zero_checkpoint``,
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (0.19.7, 0.19.8), and
:mod:`~lightning_zero3.checkpoints.layout_record`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.checkpoints import layout_record, shards
from lightning_zero3.checkpoints.layout_record import Range
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
from lightning_zero3.checkpoints.places import MODEL, OPTIMIZER, Place, UnfitCheckpointError
from lightning_zero3.checkpoints.shards import Shard
from lightning_zero3.moe.boxes import Block, Ints, boxes_of_range, strides_of
from lightning_zero3.moe.weight_names import EXPERTS, Held

_MODEL_FILE = re.compile(rf"zero_pp_rank_(\d+)_mp_rank_(\d+){re.escape(MODEL)}")


@dataclass(frozen=True)
class Part:
    """A range of a rank's tensor, in its files.

    Args:
        shard: The rank's files.
        sub_group: Of the optimizer; None for a frozen parameter.
        offset: Where in the sub-group it begins.
        name: The rank's name of the tensor.
        range: Which part of the model's tensor that is.
    """

    shard: Shard
    sub_group: int | None
    offset: int
    name: str
    range: Range

    def values(self, kind: str | None) -> torch.Tensor:
        """Its elements, 1-d, with those of the whole sub-group around it.

        Args:
            kind: A state of the optimizer's; None for the weights.
        """
        flat: torch.Tensor
        if self.sub_group is None:
            flat = self.shard.model["frozen_param_fragments"][self.name].reshape(-1)
        elif kind is None:
            flat = self.shard.optimizer["fp32_flat_groups"][self.sub_group]
        else:
            flat = self.shard.optimizer["optimizer_state_dict"]["state"][self.sub_group][kind]
        return flat


@dataclass(frozen=True)
class Copy:
    """A box to be copied from a file into a rank's range of a tensor.

    Args:
        part: Where it is.
        block: From this rank's tensor to the part's.
    """

    part: Part
    block: Block

    def into(self, target: torch.Tensor, shape: Ints, start: int, kind: str | None) -> None:
        """Copy the box.

        Args:
            target: 1-d, begins with element ``start`` of the tensor here.
            shape: The tensor's here.
            start: The first element that is kept here.
            kind: As :meth:`Part.values`.
        """
        source, where = self.part.values(kind), self.part.range
        there = strides_of(where.shape)
        first = self.part.offset + _at(self.block.there, there) - where.start
        values = source.as_strided(self.block.size, there, source.storage_offset() + first)
        here = strides_of(shape)
        target.as_strided(self.block.size, here, target.storage_offset() + _at(self.block.here, here) - start).copy_(
            values
        )


def _at(place: Sequence[int], strides: Sequence[int]) -> int:
    return sum(each * stride for each, stride in zip(place, strides, strict=True))


@dataclass
class SavedParts:
    """All ranks' files of a checkpoint, mapped, and what they are of the whole model.

    Args:
        shards: By rank.
        parts: By the whole tensor's name.
        buffers: The whole model's names of buffers, with their values.
        sizes: Numbers of ranks by kind, as far as they are known.
    """

    shards: list[Shard]
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def copies(self, name: str, here: Range) -> list[Copy]:
        """What is to be copied into a rank's range of a tensor.

        Args:
            name: The whole tensor's, one of ``parts``.
            here: The range.

        Raises:
            UnfitCheckpointError: The files hold another shape of it, or not all of it.
        """
        seen: set[tuple[Ints, Ints]] = set()
        found: list[Copy] = []
        wanted = list(_of_the_whole(here))
        for part in self.parts[name]:
            if part.range.held.whole != here.held.whole:
                raise UnfitCheckpointError(
                    f"{name} is {part.range.held.whole} in {part.shard.model_file}, and {here.held.whole} here."
                )
            for block in _of_the_whole(part.range):
                # Tensor-parallel peers have the same copy of what isn't split.
                if (block.there, block.size) in seen:
                    continue
                seen.add((block.there, block.size))
                found += [Copy(part, both) for each in wanted if (both := each.then(block.turned())) is not None]
        covered = sum(copy.block.numel for copy in found)
        if covered != here.stop - here.start:
            raise UnfitCheckpointError(
                f"{self.shards[0].model_file.parent} holds {covered:,} of the {here.stop - here.start:,} elements of "
                f"{name} that this rank wants: its files aren't those of one layout."
            )
        return found


def _of_the_whole(part: Range) -> Iterator[Block]:
    """From the rank's tensor to the whole one, for all boxes that a range is made of."""
    for start, size in boxes_of_range(part.shape, part.start, part.stop):
        for block in part.held.blocks:
            if (found := block.within(start, size)) is not None:
                yield found


def files_of(place: Place) -> list[tuple[Path, Path]]:
    """All ranks' files, in the order of the ranks that have saved them.

    Args:
        place: The checkpoint.

    Raises:
        DamagedCheckpointError: One is missing.
    """
    found = {}
    for path in place.shards.iterdir():
        if (match := _MODEL_FILE.fullmatch(path.name)) is not None:
            found[int(match[1]), int(match[2])] = path
    ranks, peers = (1 + max((each[which] for each in found), default=-1) for which in (0, 1))
    files = []
    for rank in range(ranks):
        for peer in range(peers):
            name = f"zero_pp_rank_{rank}_mp_rank_{peer:02d}"
            optimizer = place.shards / f"{name}{OPTIMIZER}"
            bf16 = optimizer.with_name(f"bf16_{optimizer.name}")
            files.append((place.shards / f"{name}{MODEL}", bf16 if bf16.exists() else optimizer))
    for path in (path for both in files for path in both):
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing.")
    return files


def open_all(files: Sequence[tuple[Path, Path]], *, trust: bool) -> SavedParts:
    """Read what all ranks' files hold, all but the tensors' values.

    Args:
        files: All of a checkpoint's.
        trust: Whether what is in them may be run.

    Raises:
        DamagedCheckpointError: A file contradicts itself or another.
        UnfitCheckpointError: It isn't known which part of the model they hold.
    """
    every = [shards.open_shard(*both, trust=trust) for both in files]
    first = every[0]
    if (counted := first.model["dp_world_size"] * first.model["mp_world_size"]) != len(every):
        raise DamagedCheckpointError(
            f"{first.model_file.parent} holds files of {len(every)} ranks, and was saved by {counted}."
        )
    saved = SavedParts(every)
    for rank, shard in enumerate(every):
        ranges = _ranges(shard, rank)
        for name, range_, sub_group, offset in _laid_out(shard, ranges):
            saved.parts[range_.held.name].append(Part(shard, sub_group, offset, name, range_))
        if rank == 0:
            saved.buffers = _buffers(shard, ranges)
    entry = every[0].model.get(layout_record.SAVED) or {}
    saved.sizes = {name: value for name, value in entry.items() if isinstance(value, int)}
    return saved


def _buffers(shard: Shard, ranges: Mapping[str, Range]) -> dict[str, Any]:
    parameters = {name for group in shard.model["param_shapes"] for name in group}
    parameters |= set(shard.model.get("frozen_param_shapes") or {}) | set(shard.model.get("shared_params") or {})
    return {
        ranges[name].held.name if name in ranges else name: value
        for name, value in shard.model["module"].items()
        if name not in parameters
    }


def _ranges(shard: Shard, rank: int) -> dict[str, Range]:
    entry = shard.model.get(layout_record.SAVED)
    if entry is None:
        return _guessed(shard, rank)
    if "unknown" in entry:
        raise UnfitCheckpointError(
            f"{shard.model_file} can't be read into another layout. The run that has saved it said: {entry['unknown']}"
        )
    return layout_record.recorded(entry)


def _guessed(shard: Shard, rank: int) -> dict[str, Range]:
    """Without a record, as stock and earlier versions save: whole tensors, in as many parts as there are ranks."""
    shapes = {name: shape for group in shard.model["param_shapes"] for name, shape in group.items()}
    shapes |= shard.model.get("frozen_param_shapes") or {}
    experts = any(name.endswith(tuple(EXPERTS)) for name in shapes)
    if shard.model["mp_world_size"] > 1 or experts:
        raise UnfitCheckpointError(
            f"{shard.model_file} doesn't say which experts or slices it holds: it was saved by stock DeepSpeed, or by "
            "an earlier version of this package. Resume it with the layout that it was saved with, and save it again."
        )
    found = {}
    for name, shape in shapes.items():
        size = -(-torch.Size(shape).numel() // shard.model["dp_world_size"])
        start = min(rank * size, torch.Size(shape).numel())
        held = Held(name, tuple(shape), (Block.of_all(shape),))
        found[name] = Range(held, tuple(shape), start, min(start + size, torch.Size(shape).numel()), size)
    return found


def _laid_out(shard: Shard, ranges: Mapping[str, Range]) -> Iterator[tuple[str, Range, int | None, int]]:
    flats = shard.optimizer["fp32_flat_groups"]
    groups = shard.model["param_shapes"]
    if len(flats) != len(groups):
        raise DamagedCheckpointError(f"{shard.optimizer_file} doesn't fit its model file.")
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        offset = 0
        for name, shape in group.items():
            if name not in ranges or ranges[name].shape != tuple(shape):
                raise DamagedCheckpointError(f"{shard.model_file}: its record of the layout lacks {name}.")
            yield name, ranges[name], index, offset
            offset += ranges[name].size
        if offset != flat.numel():
            raise DamagedCheckpointError(
                f"{shard.optimizer_file}: sub-group {index} has {flat.numel():,} elements, and its parameters have "
                f"{offset:,}."
            )
    for name in shard.model.get("frozen_param_shapes") or {}:
        if shard.model["frozen_param_fragments"][name].numel() != ranges[name].size:
            raise DamagedCheckpointError(f"{shard.model_file}: {name} isn't of the size that its layout gives it.")
        yield name, ranges[name], None, 0
