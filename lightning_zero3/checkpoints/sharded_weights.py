# SPDX-License-Identifier: Apache-2.0
"""The weights of a sharded checkpoint, into a module of the same layout or of another number of ranks.

DeepSpeed loads weights together with optimizer states only; without an optimizer it makes a whole fp32 model on every
rank first, and then fails. Here each rank reads what it holds, from files that are mapped into memory, not read whole.

Source of the format: ``DeepSpeedEngine._save_checkpoint``, ``_save_moe_checkpoint`` and ``_save_zero_checkpoint``,
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (0.19.7, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3.checkpoints import layout_record, unpickling
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
from lightning_zero3.checkpoints.places import MODEL, OPTIMIZER, Place, UnfitCheckpointError
from lightning_zero3.listing import by_kind, shortened
from lightning_zero3.moe.own_part import own_part
from lightning_zero3.topology import Topology

# What DeepSpeed's files hold for itself; all other entries are Lightning's.
_DEEPSPEEDS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
    | {"global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"}
    | {"ds_autoep_layers", "universal_checkpoint_info", layout_record.SAVED}
)


def load_sharded(module: nn.Module, files: ShardFiles, *, strict: bool, trust: bool) -> ShardedWeights:
    """Find a sharded checkpoint's weights and buffers for a module whose parameters are partitioned; change nothing.

    Args:
        module: The root module, with its engine's layers in place.
        files: The checkpoint's, for this rank.
        strict: Whether names that only one of both has are an error.
        trust: Whether what is in files may be run.

    Raises:
        DamagedCheckpointError: Files are missing or can't be read.
        UntrustedCheckpointError: They hold something that would have to be run to be read.
        UnfitCheckpointError: Their tensors don't fit the module, or, with ``strict``, their names.
    """
    files.open(trust)
    place = files.place
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    shared = files.own.get("shared_params") or {}
    sources = files.sources(named)
    _check_names(module, named, sources, shared, files, strict)
    partitions = [(name, parameter, sources[name]) for name, parameter in named.items() if name in sources]
    for name, parameter, source in partitions:
        if tuple(source.shape) != tuple(parameter.ds_shape):
            raise UnfitCheckpointError(
                f"{name} is {tuple(source.shape)} in {place.shards} and {tuple(parameter.ds_shape)} here. "
                "Expert and tensor parallel sizes must be those of the run that has saved it."
            )
        source.require_size(name, parameter, place)
    beside = {name: value for name, value in files.own["module"].items() if name not in named}
    for name, buffer in module.named_buffers():
        if name in beside and tuple(beside[name].shape) != tuple(buffer.shape):
            raise UnfitCheckpointError(
                f"{name} is {tuple(beside[name].shape)} in {place.shards} and {tuple(buffer.shape)} here."
            )
    return ShardedWeights(module, files.own, partitions, beside)


class ShardedWeights:
    """Weights that were found to fit, still in their files.

    Args:
        module: The root module.
        model: What a model file holds.
        partitions: Parameters with their names and where their values are.
        beside: Buffers and extra states.
    """

    def __init__(
        self,
        module: nn.Module,
        model: dict[str, Any],
        partitions: list[tuple[str, Any, _Source]],
        beside: dict[str, Any],
    ) -> None:
        self._module, self.model, self._partitions, self._beside = module, model, partitions, beside

    def apply(self) -> None:
        """Give the module's partitions, its buffers, and masters where there are any, the files' values."""
        for _, parameter, source in self._partitions:
            with own_part(parameter) as part:
                part.fill(source.partition_for(parameter))
        _load_all_but_parameters(self._module, self._beside)


def warn_of_frozen_left_out(names: Sequence[str]) -> None:
    """Say which frozen parameters a checkpoint doesn't hold.

    Args:
        names: Theirs.
    """
    rank_zero_warn(
        f"The checkpoint was saved without frozen parameters; {len(names)} stay as they are: {shortened(names)}."
    )


def client_state(model: dict[str, Any]) -> dict[str, Any]:
    """What Lightning has saved beside the weights.

    Args:
        model: What a model file holds.
    """
    return {name: value for name, value in model.items() if name not in _DEEPSPEEDS}


class _Source:
    """A parameter's values in the files: one part per file, each of the same size."""

    def __init__(self, shape: Any, parts: list[torch.Tensor]) -> None:
        self.shape, self._parts = shape, parts

    def require_size(self, name: str, parameter: Any, place: Place) -> None:
        """Refuse parts that are too short for a whole parameter.

        Args:
            name: The parameter's.
            parameter: It, partitioned.
            place: The checkpoint.

        Raises:
            UnfitCheckpointError: They are.
        """
        found = sum(part.numel() for part in self._parts)
        alone = len(self._parts) == 1 and found == parameter.partition_numel()
        if not alone and found < parameter.ds_numel:
            raise UnfitCheckpointError(
                f"{name} has {found:,} elements in the files of {place.shards}, and {parameter.ds_numel:,} here."
            )

    def partition_for(self, parameter: Any) -> torch.Tensor:
        """This rank's partition, 1-d, in the file's dtype; zeros where it is padding."""
        size, numel = parameter.partition_numel(), parameter.ds_numel
        if len(self._parts) == 1 and self._parts[0].numel() == size:
            return self._parts[0]
        start = size * torch.distributed.get_rank(group=parameter.ds_process_group)
        end = min(start + size, numel)
        result = torch.zeros(size, dtype=self._parts[0].dtype)
        each = self._parts[0].numel()
        for index, part in enumerate(self._parts):
            first, last = max(start, index * each), min(end, (index + 1) * each)
            if first < last:
                result[first - start : last - start] = part[first - index * each : last - index * each]
        return result


class ShardFiles:
    """The files of a checkpoint that this rank needs: its own, or all where the number of ranks has changed.

    Args:
        place: The checkpoint.
        layout: The run's layout.
        rank: This rank.

    Raises:
        UnfitCheckpointError: It was saved with other parallel sizes.
        DamagedCheckpointError: A file is missing.
    """

    def __init__(self, place: Place, layout: Topology, rank: int) -> None:
        self.place = place
        self._folder = place.shards
        self._mp = layout.tensor_parallel_ranks(rank).index(rank)
        own = layout.data_parallel_rank(rank)
        saved = self._ranks(layout)
        self._here, self._saved = layout.data_parallel_size, len(saved)
        for missing in sorted(set(range(saved[-1] + 1)) - set(saved)):
            raise DamagedCheckpointError(f"{self._path(missing, MODEL)} is missing.")
        parallel = layout.expert_parallel_size > 1 or layout.tensor_parallel_size > 1
        if self._saved != self._here and parallel:
            raise UnfitCheckpointError(
                f"{self._folder} was saved by {self._saved} data-parallel ranks, and there are {self._here} here. With "
                "expert or tensor parallelism their numbers must be equal."
            )
        self._read = [own] if self._saved == self._here else saved
        mine = self._read if len(self._read) == 1 and self._saved == self._here else saved[own :: self._here]
        self.to_verify = [(self._path(each, MODEL), self._path(each, OPTIMIZER)) for each in mine]
        self.model_file = self._path(self._read[0], MODEL)
        self.own: dict[str, Any] = {}

    def open(self, trust: bool) -> None:
        """Read this rank's model file, or the first where the number of ranks has changed.

        Args:
            trust: Whether anything in it may be run.

        Raises:
            DamagedCheckpointError: It is of a save by another number of ranks than there are files.
        """
        self._trust = trust
        path = self.model_file
        self.own = self._load(path)
        if self.own["dp_world_size"] != self._saved:
            raise DamagedCheckpointError(
                f"{self._path(self._saved, MODEL)} is missing: {path.name} is one of {self.own['dp_world_size']}."
                if self.own["dp_world_size"] > self._saved
                else f"{path} is one of {self.own['dp_world_size']}, and {self._saved} are there."
            )

    def sources(self, named: dict[str, Any]) -> dict[str, _Source]:
        """Where each parameter's values are, by name.

        Args:
            named: The module's parameters.
        """
        states = [self.own] if len(self._read) == 1 else [self._load(self._path(r, MODEL)) for r in self._read]
        flats = [self._flats(rank) for rank in self._read]
        found: dict[str, _Source] = {}
        if any(len(each) != len(self.own["param_shapes"]) for each in flats):
            raise self._unfit()
        for index, shapes in enumerate(self.own["param_shapes"]):
            offset = 0
            group = [flat[index] for flat in flats]
            total = group[0].numel()
            sizes = self._own_sizes(shapes, named) or self._sizes(shapes, total)
            if any(flat.numel() != sum(sizes) for flat in group):
                raise self._unfit()
            for (name, shape), size in zip(shapes.items(), sizes, strict=True):
                found[name] = _Source(shape, [flat[offset : offset + size] for flat in group])
                offset += size
        for name, shape in (self.own.get("frozen_param_shapes") or {}).items():
            found[name] = _Source(shape, [state["frozen_param_fragments"][name].reshape(-1) for state in states])
        return found

    def _own_sizes(self, shapes: dict[str, Any], named: dict[str, Any]) -> list[int]:
        """Elements of each parameter in this rank's own file, where the layout is the same; else nothing.

        Under tensor parallelism, what ``zero.Init`` has partitioned lies on other ranks than what AutoTP has split.
        """
        alike = all(name in named and tuple(named[name].ds_shape) == tuple(shape) for name, shape in shapes.items())
        return [named[name].partition_numel() for name in shapes] if alike and self._saved == self._here else []

    def _sizes(self, shapes: dict[str, Any], total: int) -> list[int]:
        """Elements of each parameter in a rank's part of a sub-group.

        A sub-group is partitioned over one process group: all data-parallel ranks, or those with the same experts.
        """
        numels = [torch.Size(shape).numel() for shape in shapes.values()]
        for ranks in (n for n in range(self._saved, 0, -1) if self._saved % n == 0):
            sizes = [-(-numel // ranks) for numel in numels]
            if sum(sizes) == total:
                return sizes
        raise self._unfit()

    def _unfit(self) -> UnfitCheckpointError:
        path = self._path(self._read[0], OPTIMIZER)
        return UnfitCheckpointError(f"{path}, or another rank's, doesn't fit its model file.")

    def _flats(self, rank: int) -> list[torch.Tensor]:
        flats: list[torch.Tensor] = self._load(self._path(rank, OPTIMIZER))["optimizer_state_dict"]["fp32_flat_groups"]
        return flats

    def _ranks(self, layout: Topology) -> list[int]:
        every = self._folder.glob(f"zero_pp_rank_*{MODEL}")
        peers = {path.name.split("_mp_rank_")[1][:2] for path in every}
        if len(peers) != layout.tensor_parallel_size:
            raise UnfitCheckpointError(
                f"{self._folder} holds weights for tensor parallel size {len(peers)}, and it is "
                f"{layout.tensor_parallel_size} here."
                if peers
                else f"There are no model files in {self._folder}."
            )
        names = [path.name for path in self._folder.glob(f"zero_pp_rank_*_mp_rank_{self._mp:02d}{MODEL}")]
        return sorted(int(name.removeprefix("zero_pp_rank_").split("_")[0]) for name in names)

    def _path(self, rank: int, kind: str) -> Path:
        name = f"zero_pp_rank_{rank}_mp_rank_{self._mp:02d}{kind}"
        bf16 = self._folder / f"bf16_{name}"
        return bf16 if bf16.exists() else self._folder / name

    def _load(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing.")
        loaded: dict[str, Any] = unpickling.read(path, trust=self._trust, mapped=True)
        return loaded


def _check_names(
    module: nn.Module,
    named: dict[str, Any],
    sources: dict[str, _Source],
    shared: Any,
    files: ShardFiles,
    strict: bool,
) -> None:
    own = files.own
    found = {id(named[name]) for name in sources if name in named}
    missing = [name for name, parameter in named.items() if id(parameter) not in found]
    if not own.get("frozen_param_shapes"):
        left_out = [name for name in missing if not named[name].requires_grad]
        missing = [name for name in missing if name not in left_out]
        if left_out:
            warn_of_frozen_left_out(left_out)
    known = named.keys() | module.state_dict().keys()
    unexpected = [name for name in (*sources, *own["module"]) if name not in known and name not in shared]
    if strict and (missing or unexpected):
        parts = by_kind((("missing in the checkpoint", missing), ("unknown to the module", unexpected)))
        raise UnfitCheckpointError(
            f"The weights of {files.model_file} aren't those of {type(module).__name__}: {parts}. "
            "With `strict_loading = False` on the LightningModule what both have is loaded."
        )


def _load_all_but_parameters(module: nn.Module, values: dict[str, Any]) -> None:
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            if name in buffers:
                buffers[name].copy_(value)
    for prefix, each in _with_extra_state(module):
        if prefix + "_extra_state" in values:
            each.set_extra_state(values[prefix + "_extra_state"])


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, each in module.named_modules():
        if type(each).set_extra_state is not nn.Module.set_extra_state:
            yield (f"{name}." if name else ""), each
