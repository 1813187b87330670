# SPDX-License-Identifier: Apache-2.0
"""Which part of which tensor each rank's files of a sharded checkpoint hold.

A sub-group's parameters are partitioned over one process group: over all ranks (what ``zero.Init`` has partitioned),
the data-parallel ones (what AutoTP has split), or those with the same experts. With AutoEP the files say which; else
the sizes do.

Source of the format: ``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` and ``_zero3_partition_group_metadata``,
``DeepSpeedEngine._save_moe_checkpoint``, ``collect_autotp_universal_checkpoint_info`` (0.19.7, 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.checkpoints import layout_record
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
from lightning_zero3.checkpoints.places import UnfitCheckpointError
from lightning_zero3.checkpoints.shards import Shard
from lightning_zero3.moe.boxes import Block, Ints
from lightning_zero3.moe.weight_names import EXPERTS

Rank = tuple[int, int]


class SavedLayout:
    """The layout of a checkpoint.

    Args:
        shards: Every rank's files: data-parallel and tensor-parallel rank → files.
        folder: What messages call the checkpoint.

    Raises:
        DamagedCheckpointError: Two files of a rank don't fit together.
    """

    def __init__(self, shards: Mapping[Rank, Shard], folder: Path) -> None:
        self._shards, self._folder = dict(shards), folder
        self._slices = 1 + max(mp for _, mp in shards)
        self._world = len(shards)
        self.names = tuple(
            dict.fromkeys(
                name
                for shard in shards.values()
                for group in (*shard.model["param_shapes"], shard.model.get("frozen_param_shapes") or {})
                for name in group
            )
        )
        info = next(iter(shards.values())).model.get("universal_checkpoint_info") or {}
        self._widths: Mapping[str, Any] = info.get("sub_param_shard_widths") or {}
        self._unsupported: Mapping[str, Any] = info.get("autotp_unsupported_parameter_patterns") or {}
        self._local = {rank: dict(_shapes(shard)) for rank, shard in shards.items()}
        self._first_expert = {
            rank: {entry["expert_key_prefix"]: entry for entry in shard.model.get("ds_autoep_layers") or ()}
            for rank, shard in shards.items()
        }

    def parameters(self, rank: Rank) -> Iterator[tuple[str, Ints, int, torch.Tensor]]:
        """What a rank's files hold.

        Args:
            rank: Its data-parallel and tensor-parallel rank.

        Yields:
            A parameter's name, its shape on that rank, the first of its flattened elements that is held, and the
            elements from there on, with padding.
        """
        shard = self._shards[rank]
        flats = shard.optimizer["fp32_flat_groups"]
        groups = shard.optimizer.get("ds_zero_partition_groups") or [None] * len(flats)
        if not len(flats) == len(groups) == len(shard.model["param_shapes"]):
            raise self._unfit(shard)
        for flat, group, shapes in zip(flats, groups, shard.model["param_shapes"], strict=True):
            count, index = self._partition(rank, group, shapes, flat.numel())
            offset = 0
            for name, shape in shapes.items():
                size = -(-torch.Size(shape).numel() // count)
                yield name, tuple(shape), size * index, flat[offset : offset + size]
                offset += size
        fragments = shard.model.get("frozen_param_fragments") or {}
        for name, shape in (shard.model.get("frozen_param_shapes") or {}).items():
            if name not in fragments:
                continue  # saved with exclude_frozen_parameters
            values = fragments[name].reshape(-1)
            start = self._recorded(rank, name)
            if start is None:
                _, index = self._partition(rank, None, {name: shape}, values.numel())
                start = values.numel() * index
            yield name, tuple(shape), start, values

    def _recorded(self, rank: Rank, name: str) -> int | None:
        """Where a rank's part of a parameter begins, if the checkpoint says so: of frozen experts nothing else does."""
        ranges = (self._shards[rank].model.get(layout_record.SAVED) or {}).get("ranges") or {}
        return int(ranges[name][4]) if name in ranges else None

    def buffers(self, rank: Rank) -> Iterator[tuple[str, torch.Tensor]]:
        """A rank's buffers.

        Args:
            rank: Its data-parallel and tensor-parallel rank.
        """
        model = self._shards[rank].model
        for name in model.get("buffer_names") or ():
            if torch.is_tensor(values := model["module"].get(name)):
                yield name, values

    def blocks(self, rank: Rank, name: str, local: Ints, whole: Ints, expert: str | None) -> tuple[Block, ...]:
        """Which part of Transformers' tensor a rank's tensor is.

        Args:
            rank: Its data-parallel and tensor-parallel rank.
            name: The parameter.
            local: Its shape on that rank.
            whole: The shape of Transformers' tensor.
            expert: Which of AutoEP's experts' tensors it is, or None.

        Raises:
            UnfitCheckpointError: It can't be one.
        """
        if expert is not None:
            entry = self._first_expert[rank].get(name.rpartition(".")[0])
            joined, place = EXPERTS[expert]
            if entry is None or (entry["num_experts"], joined * local[1], local[2]) != tuple(whole):
                raise self._another(name, local, whole)
            return (Block((0, 0, 0), (entry["global_expert_start"], place * local[1], 0), local),)
        return self.whole(name, local, whole) if local == tuple(whole) else self._slice(rank, name, local, whole)

    def whole(self, name: str, local: Ints, whole: Ints) -> tuple[Block, ...]:
        """A tensor that every rank has whole.

        Args:
            name: What it is called.
            local: Its shape.
            whole: The shape of Transformers' tensor.

        Raises:
            UnfitCheckpointError: They differ.
        """
        if local != tuple(whole):
            raise self._another(name, local, whole)
        return (Block.of_all(local),)

    def _slice(self, rank: Rank, name: str, local: Ints, whole: Ints) -> tuple[Block, ...]:
        dims = [dim for dim, (a, b) in enumerate(zip(local, whole, strict=False)) if a != b]
        if len(local) != len(whole) or len(dims) != 1 or any(re.match(each, name) for each in self._unsupported):
            raise self._another(name, local, whole)
        (dim,) = dims
        own = [self._local[rank[0], mp][name][dim] for mp in range(self._slices)]
        widths = next((each for pattern, each in self._widths.items() if re.match(pattern, name)), [own])
        blocks, here, there = [], 0, 0
        for each in widths:
            width, begin = each[rank[1]], there + sum(each[: rank[1]])
            size = tuple(width if d == dim else n for d, n in enumerate(whole))
            blocks.append(Block(_at(dim, here, whole), _at(dim, begin, whole), size))
            here, there = here + width, there + sum(each)
        if (here, there) != (local[dim], whole[dim]):
            raise self._another(name, local, whole)
        return tuple(blocks)

    def _partition(self, rank: Rank, group: Any, shapes: Mapping[str, Any], total: int) -> tuple[int, int]:
        """Over how many ranks a sub-group is partitioned, and which of them this one is."""
        place = rank[0] * self._slices + rank[1]
        numels = [torch.Size(shape).numel() for shape in shapes.values()]
        if group is not None:
            members = list(group["partition_ranks"])
            if place not in members or sum(-(-numel // len(members)) for numel in numels) != total:
                raise self._unfit(self._shards[rank])
            return len(members), members.index(place)
        fitting = [
            (count, index)
            for count, index in dict.fromkeys(((self._world // self._slices, rank[0]), (self._world, place)))
            if sum(-(-numel // count) for numel in numels) == total
        ]
        if not fitting:
            raise self._unfit(self._shards[rank])
        if len(fitting) > 1:
            raise UnfitCheckpointError(
                f"{self._folder} doesn't tell over which ranks {next(iter(shapes))} is partitioned: it is too small. "
                "Export from the engine: lightning_zero3.moe.export.save_pretrained."
            )
        return fitting[0]

    def _unfit(self, shard: Shard) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{shard.optimizer_file} doesn't fit {shard.model_file.name}.")

    def _another(self, name: str, local: Sequence[int], whole: Sequence[int]) -> UnfitCheckpointError:
        return UnfitCheckpointError(
            f"{name} is {'x'.join(map(str, local))} in {self._folder}, which is no part of the model's "
            f"{'x'.join(map(str, whole))}. Is it the config of the model that was trained?"
        )


def _shapes(shard: Shard) -> Iterator[tuple[str, Ints]]:
    for group in (*shard.model["param_shapes"], shard.model.get("frozen_param_shapes") or {}):
        for name, shape in group.items():
            yield name, tuple(shape)


def _at(dim: int, position: int, shape: Sequence[int]) -> Ints:
    return tuple(position if d == dim else 0 for d in range(len(shape)))
