"""The weights of a sharded checkpoint, into a module of the same layout or of another number of ranks.

DeepSpeed loads weights together with optimizer states only; without an optimizer it makes a whole fp32 model on every
rank first, and then fails. Here each rank reads what it holds, from files that are mapped into memory, not read whole.

Source of the format: ``DeepSpeedEngine._save_checkpoint``, ``_save_moe_checkpoint`` and ``_save_zero_checkpoint``,
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (0.19.7, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3.moe.own_part import own_part
from lightning_zero3.topology import Topology

# What DeepSpeed's files hold for itself; all other entries are Lightning's.
_DEEPSPEEDS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
    | {"global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"}
    | {"ds_autoep_layers", "universal_checkpoint_info"}
)
_NAMED = 5


class UnfitCheckpointError(RuntimeError):
    """A checkpoint's weights don't belong to this module, or to this layout of ranks."""


def load_sharded(module: nn.Module, folder: str | Path, layout: Topology, rank: int, *, strict: bool) -> dict[str, Any]:
    """Load weights and buffers of a sharded checkpoint into a module whose parameters are partitioned.

    Masters, where there are any, take the same values. Nothing is changed unless everything fits.

    Args:
        module: The root module, with its engine's layers in place.
        folder: The checkpoint.
        layout: The run's layout.
        rank: This rank.
        strict: Whether names that only one of both has are an error.

    Returns:
        What Lightning has saved beside the weights.

    Raises:
        UnfitCheckpointError: Files are missing, or their tensors don't fit the module.
        RuntimeError: With ``strict``: names that only one of both has.
    """
    files = _Files(Path(folder), layout, rank)
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    shared = files.own.get("shared_params") or {}
    sources = files.sources(named)
    _check_names(module, named, sources, shared, files.own, strict)
    partitions = [(name, parameter, sources[name]) for name, parameter in named.items() if name in sources]
    for name, parameter, source in partitions:
        if tuple(source.shape) != tuple(parameter.ds_shape):
            raise UnfitCheckpointError(
                f"{name} is {tuple(source.shape)} in {folder} and {tuple(parameter.ds_shape)} here. "
                "Expert and tensor parallel sizes must be those of the run that has saved it."
            )
    for _, parameter, source in partitions:
        with own_part(parameter) as part:
            part.fill(source.partition_for(parameter))
    _load_all_but_parameters(module, {name: v for name, v in files.own["module"].items() if name not in named})
    return {name: value for name, value in files.own.items() if name not in _DEEPSPEEDS}


class _Source:
    """A parameter's values in the files: one part per file, each of the same size."""

    def __init__(self, shape: Any, parts: list[torch.Tensor]) -> None:
        self.shape, self._parts = shape, parts

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


class _Files:
    """The files of a checkpoint that this rank needs: its own, or all where the number of ranks has changed."""

    def __init__(self, folder: Path, layout: Topology, rank: int) -> None:
        self._folder = folder / _tag(folder)
        self._mp = layout.tensor_parallel_ranks(rank).index(rank)
        own = layout.data_parallel_rank(rank)
        saved = self._ranks(layout)
        self._here, self._saved = layout.data_parallel_size, len(saved)
        parallel = layout.expert_parallel_size > 1 or layout.tensor_parallel_size > 1
        if self._saved != self._here and parallel:
            raise UnfitCheckpointError(
                f"{folder} was saved by {self._saved} data-parallel ranks, and there are {self._here} here. With "
                "expert or tensor parallelism their numbers must be equal."
            )
        self._read = [own] if self._saved == self._here else saved
        self.own = _load(self._path(own if self._saved == self._here else 0, "model_states.pt"))

    def sources(self, named: dict[str, Any]) -> dict[str, _Source]:
        """Where each parameter's values are, by name.

        Args:
            named: The module's parameters.
        """
        states = [self.own] if len(self._read) == 1 else [_load(self._path(r, "model_states.pt")) for r in self._read]
        flats = [self._flats(rank) for rank in self._read]
        found: dict[str, _Source] = {}
        for index, shapes in enumerate(self.own["param_shapes"]):
            offset = 0
            group = [flat[index] for flat in flats]
            sizes = self._own_sizes(shapes, named) or self._sizes(shapes, group[0].numel())
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
        raise UnfitCheckpointError(f"The optimizer files in {self._folder} don't fit its model files.")

    def _flats(self, rank: int) -> list[torch.Tensor]:
        flats: list[torch.Tensor] = _load(self._path(rank, "optim_states.pt"))["optimizer_state_dict"][
            "fp32_flat_groups"
        ]
        return flats

    def _ranks(self, layout: Topology) -> list[int]:
        every = self._folder.glob("zero_pp_rank_*_model_states.pt")
        peers = {path.name.split("_mp_rank_")[1][:2] for path in every}
        if len(peers) != layout.tensor_parallel_size:
            raise UnfitCheckpointError(
                f"{self._folder} holds weights for tensor parallel size {len(peers)}, and it is "
                f"{layout.tensor_parallel_size} here."
                if peers
                else f"There are no model files in {self._folder}."
            )
        names = [path.name for path in self._folder.glob(f"zero_pp_rank_*_mp_rank_{self._mp:02d}_model_states.pt")]
        return sorted(int(name.removeprefix("zero_pp_rank_").split("_")[0]) for name in names)

    def _path(self, rank: int, kind: str) -> Path:
        name = f"zero_pp_rank_{rank}_mp_rank_{self._mp:02d}_{kind}"
        bf16 = self._folder / f"bf16_{name}"
        return bf16 if bf16.exists() else self._folder / name


def _tag(folder: Path) -> str:
    latest = folder / "latest"
    if not latest.is_file():
        raise UnfitCheckpointError(f"{folder} is no sharded checkpoint: it has no file named latest.")
    return latest.read_text().strip()


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UnfitCheckpointError(f"{path} is missing.")
    # As DeepSpeed itself reads it: Lightning's entries may be any object.
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return loaded


def _check_names(
    module: nn.Module,
    named: dict[str, Any],
    sources: dict[str, _Source],
    shared: Any,
    own: dict[str, Any],
    strict: bool,
) -> None:
    found = {id(named[name]) for name in sources if name in named}
    missing = [name for name, parameter in named.items() if id(parameter) not in found]
    if not own.get("frozen_param_shapes"):
        left_out = [name for name in missing if not named[name].requires_grad]
        missing = [name for name in missing if name not in left_out]
        if left_out:
            rank_zero_warn(
                f"The checkpoint was saved without frozen parameters; {len(left_out)} stay as they are: "
                f"{', '.join(left_out[:_NAMED])}{', …' if len(left_out) > _NAMED else ''}."
            )
    known = named.keys() | module.state_dict().keys()
    unexpected = [name for name in (*sources, *own["module"]) if name not in known and name not in shared]
    if strict and (missing or unexpected):
        parts = [
            f"{what}: {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
            for what, names in (("missing in the checkpoint", missing), ("unknown to the module", unexpected))
            if names
        ]
        raise RuntimeError(
            f"The checkpoint's weights aren't those of {type(module).__name__}: {'; '.join(parts)}. "
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
