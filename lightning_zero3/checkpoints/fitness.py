# SPDX-License-Identifier: Apache-2.0
"""Whether a rank's files fit the engine that is to train on: asked before DeepSpeed begins to copy.

DeepSpeed copies flat buffers by their position, and looks at neither names nor shapes.

Source: ``DeepSpeedEngine._load_checkpoint``, ``_load_zero_checkpoint``,
``DeepSpeedZeroOptimizer_Stage3._rigid_load_state_dict`` (0.19.7, 0.19.8).

Upstream symbols, read: ``DeepSpeedEngine._get_ckpt_name``, ``_get_zero_ckpt_name`` and ``_get_zero_param_shapes``,
which alone know what a rank's files are called and in which order shapes lie in them;
``DeepSpeedZeroOptimizer_Stage3._zero3_partition_group_metadata``; torch's ``Module._load_from_state_dict`` and
``_load_state_dict_pre_hooks`` (torch 2.13), by which a module may take other names than its own. A missing name
raises. Expires when DeepSpeed compares names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero3.checkpoints import unpickling
from lightning_zero3.checkpoints.places import MODEL, Place, UnfitCheckpointError
from lightning_zero3.checkpoints.shards import Shard
from lightning_zero3.listing import by_kind, shortened
from lightning_zero3.moe.weight_names import EXPERTS

_ANY_LAYOUT = 'With resume_layout="universal" a checkpoint of another layout is read into this one.'


def own_ranks(engine: Any) -> tuple[int, int]:
    """Data-parallel and tensor-parallel ranks of a run.

    Args:
        engine: An engine with an optimizer.
    """
    return engine.seq_dp_world_size, engine.mp_world_size


def saved_ranks(place: Place) -> tuple[int, int]:
    """Data-parallel and tensor-parallel ranks of the run that has saved a checkpoint, by its files' names.

    Args:
        place: The checkpoint.
    """
    stems = [path.name.removesuffix(MODEL).split("_mp_rank_") for path in place.shards.glob(f"zero_pp_rank_*{MODEL}")]
    pairs = [(each[0].removeprefix("zero_pp_rank_"), each[-1]) for each in stems]
    return len({rank for rank, _ in pairs}), len({peer for _, peer in pairs})


def require_same_ranks(engine: Any, place: Place, *, trust: bool) -> None:
    """Refuse fewer ranks than here, so that this rank has no file.

    Args:
        engine: An engine with an optimizer.
        place: The checkpoint.
        trust: Whether what is in files may be run.

    Raises:
        UnfitCheckpointError: There are fewer.
    """
    if own_files(engine, place)[0].is_file():
        return  # which is read, and says
    first = next(iter(sorted(place.shards.glob(f"zero_pp_rank_*{MODEL}"))), None)
    if first is None:
        return
    model = unpickling.read(first, trust=trust, mapped=True)
    saved = model.get("dp_world_size"), model.get("mp_world_size")
    if saved != own_ranks(engine):
        raise _other_ranks(first, saved, own_ranks(engine))


def _other_ranks(path: Path, saved: tuple[Any, Any], here: tuple[int, int]) -> UnfitCheckpointError:
    return UnfitCheckpointError(
        f"{path} was saved by {saved[0]} data-parallel ranks with tensor parallel size {saved[1]}, and there are "
        f"{here[0]} with {here[1]} here. Resume with as many ranks and the same parallel sizes. {_ANY_LAYOUT}"
    )


def own_files(engine: Any, place: Place) -> tuple[Path, Path]:
    """The model file and the optimizer file that DeepSpeed would read on this rank.

    Args:
        engine: An engine with an optimizer.
        place: The checkpoint.
    """
    folder, tag = str(place.folder), place.tag
    return Path(engine._get_ckpt_name(folder, tag)), Path(engine._get_zero_ckpt_name(folder, tag))


def swapped_files(engine: Any, place: Place) -> Path | None:
    """The folder with this rank's part of an optimizer that lives on NVMe; None for one that doesn't.

    Args:
        engine: An engine with an optimizer.
        place: The checkpoint.

    Raises:
        UnfitCheckpointError: The checkpoint has none.
    """
    from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

    if not engine.zero_nvme_offload_optimizer():
        return None
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    folder = place.shards / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"
    if not folder.is_dir():
        raise UnfitCheckpointError(
            f"{folder} is missing: this run keeps its optimizer on NVMe, and a checkpoint of such a run has a copy of "
            "it there. Resume with the offload settings of the run that has saved it."
        )
    return folder


def require_fit(engine: Any, shard: Shard) -> None:
    """Refuse another model's files, another number of ranks', or another layout's.

    Args:
        engine: An engine with an optimizer.
        shard: This rank's files.

    Raises:
        UnfitCheckpointError: They don't fit.
    """
    here = own_ranks(engine)
    saved = shard.model["dp_world_size"], shard.model["mp_world_size"]
    if saved != here:
        raise _other_ranks(shard.model_file, saved, here)
    _require_same_parameters(engine._get_zero_param_shapes(), shard)
    _require_same_frozen(engine.module, shard)
    _require_same_flats(engine.optimizer, shard)
    _require_same_optimizer(engine.optimizer, shard)


def _require_same_parameters(here: Any, shard: Shard) -> None:
    saved = shard.model["param_shapes"]
    listed = [(name, tuple(shape)) for group in saved for name, shape in group.items()]
    wanted = [(name, tuple(shape)) for group in here for name, shape in group.items()]
    names, wanted_names = {name for name, _ in listed}, {name for name, _ in wanted}
    lacking, unknown = sorted(wanted_names - names), sorted(names - wanted_names)
    if lacking or unknown:
        parts = by_kind((("missing there", lacking), ("unknown here", unknown)))
        raise UnfitCheckpointError(
            f"{shard.model_file} holds other trained parameters than this module: {parts}. To go on "
            "training, module and frozen parameters must be those of the run that has saved it; "
            "engine.load_checkpoint(..., load_module_only=True) takes weights alone. Experts have other names with "
            f"and without expert_parallel_size. {_ANY_LAYOUT}"
        )
    shapes = dict(listed)
    for name, shape in wanted:
        if shapes[name] != shape:
            raise UnfitCheckpointError(
                f"{name} is {shapes[name]} in {shard.model_file}, and {shape} here. If that is for another expert or "
                f"tensor parallel size: {_ANY_LAYOUT}"
            )
    if [list(group) for group in saved] != [list(group) for group in here]:
        raise UnfitCheckpointError(
            f"{shard.model_file} holds the same parameters in another order or in other sub-groups, and DeepSpeed "
            "would give one the values of another. Resume with the optimizer, its parameter groups and the "
            'sub_group_size of the run that has saved it. With resume_layout="universal" they are read by name.'
        )


def _require_same_frozen(module: nn.Module, shard: Shard) -> None:
    """DeepSpeed copies frozen partitions by name, after it has loaded the rest."""
    fragments = shard.model.get("frozen_param_fragments")
    if fragments is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            continue
        size = getattr(parameter, "ds_tensor", parameter).numel()
        if name not in fragments or fragments[name].numel() != size:
            there = "isn't there" if name not in fragments else f"has {fragments[name].numel():,} elements"
            raise UnfitCheckpointError(
                f"{name}, frozen here, {there} among the frozen parameters of {shard.model_file}; here it has {size:,} "
                "elements on this rank."
            )


def _require_same_flats(optimizer: Any, shard: Shard) -> None:
    saved = [flat.numel() for flat in shard.optimizer["fp32_flat_groups"]]
    here = [flat.numel() for flat in optimizer.fp32_partitioned_groups_flat]
    # What is on NVMe is of size 0 here while it isn't needed.
    swapped = getattr(optimizer, "swap_optimizer", False)
    if len(saved) != len(here) or (not swapped and saved != here):
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} holds {len(saved)} sub-groups with {sum(saved):,} elements, and this rank has "
            f"{len(here)} with {sum(here):,}: it doesn't belong to this model and layout, or to its model file."
        )
    groups = shard.optimizer.get("ds_zero_partition_groups")
    if groups is not None and groups != optimizer._zero3_partition_group_metadata():
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} was saved with other expert or tensor parallel sizes, or on another rank. "
            f"{_ANY_LAYOUT}"
        )


def _require_same_optimizer(optimizer: Any, shard: Shard) -> None:
    inner, own = shard.optimizer.get("optimizer_state_dict"), optimizer.optimizer
    if inner is None:
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} holds weights only (save_weights_only=True), and no optimizer states to go on "
            "with. Evaluate it, or take its weights by engine.load_checkpoint(..., load_module_only=True)."
        )
    if not isinstance(own, torch.optim.Optimizer):
        return
    saved, flats = inner["param_groups"], [flat.numel() for flat in shard.optimizer["fp32_flat_groups"]]
    if len(saved) != len(own.param_groups):
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} holds an optimizer with {len(saved)} parameter groups, and this run's has "
            f"{len(own.param_groups)}."
        )
    if sum(len(group["params"]) for group in saved) != len(flats):
        raise UnfitCheckpointError(f"{shard.optimizer_file} holds an optimizer of other sub-groups than its weights.")
    # Sub-groups may be alike where a parameter has moved to another group: it would take that one's settings.
    groups = [list(group["params"]) for group in saved]
    ids = optimizer.sub_group_to_group_id
    if groups != [[index for index in range(len(flats)) if ids[index] == number] for number in range(len(saved))]:
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} holds parameter groups of {[len(each) for each in groups]} sub-groups, and this "
            "run's have other members. Resume with the parameter groups of the run that has saved it. With "
            'resume_layout="universal" parameters are read by name, where the groups\' settings allow.'
        )
    for group in saved:
        require_same_settings(own, group, shard.optimizer_file)
    # There are some where a step was taken before; on NVMe they aren't seen here.
    kinds = {name for state in own.state.values() for name, value in state.items() if torch.is_tensor(value)}
    there = {name for state in inner["state"].values() for name in state}
    if lacking := sorted(kinds - there - {"step"}):
        raise UnfitCheckpointError(
            f"{shard.optimizer_file} holds no {', no '.join(lacking)}: another optimizer's states, or none. Resume "
            f"with the optimizer of the run that has saved it, and not with {type(own).__name__}."
        )
    for index, state in inner["state"].items():
        for name, value in state.items():
            fits = index < len(flats) and value.numel() in (0, 1, flats[index]) if torch.is_tensor(value) else True
            if torch.is_tensor(value) and value.dim() == 1 and not fits:
                raise UnfitCheckpointError(
                    f"{shard.optimizer_file}: the optimizer's {name} of sub-group {index} has {value.numel():,} "
                    "elements, which isn't the size of its weights."
                )


def require_same_settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], path: Path) -> None:
    """Refuse another kind of optimizer's parameter group, by the names of its settings.

    Args:
        optimizer: This run's.
        group: From a checkpoint.
        path: The optimizer's file that it is from.

    Raises:
        UnfitCheckpointError: Each has settings that the other lacks; a version of torch may have added some.
    """
    own = set(optimizer.defaults)
    every = own.union(*(each for each in optimizer.param_groups))
    lacking, unknown = own - set(group), set(group) - every - {"params", "name", "moe", "initial_lr"}
    if lacking and unknown:
        raise UnfitCheckpointError(
            f"{path} holds an optimizer with {', '.join(sorted(unknown))}, and this run's {type(optimizer).__name__} "
            f"has {', '.join(sorted(lacking))} instead. Resume with the optimizer of the run that has saved it."
        )


def frozen_left_out(module: nn.Module, model: Mapping[str, Any]) -> list[str]:
    """Frozen parameters that the checkpoint doesn't hold, as with ``exclude_frozen_parameters=True``.

    Args:
        module: The engine's module.
        model: What a model file holds.
    """
    if model.get("frozen_param_shapes"):
        return []
    frozen = [name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad]
    return [name for name in frozen if name not in model["module"]]


def require_same_names(module: nn.Module, shard: Shard, left_out: list[str]) -> None:
    """Refuse a state dict of other names, as a strict ``load_state_dict`` would after it has loaded the rest.

    Where a module reads its state dict in a way of its own, names may be what it likes: only reading tells.

    Args:
        module: The engine's module.
        shard: This rank's files.
        left_out: Frozen parameters that may be missing.

    Raises:
        UnfitCheckpointError: They differ.
    """
    own = module.state_dict()
    saved: Mapping[str, Any] = shard.model["module"]
    buffers = {name for name, _ in module.named_buffers()}
    for name in buffers & own.keys() & saved.keys():
        if tuple(saved[name].shape) != tuple(own[name].shape):
            raise UnfitCheckpointError(
                f"{name} is {tuple(saved[name].shape)} in {shard.model_file}, and {tuple(own[name].shape)} here."
            )
    if any(_reads_in_its_own_way(each) for each in module.modules()):
        return
    # AutoEP's experts aren't among the weights by name, but in each rank's parts of what is trained or frozen.
    parts = {name for group in shard.model["param_shapes"] for name in group}
    parts |= set(shard.model.get("frozen_param_shapes") or {})
    elsewhere = {name for name in parts if name.endswith(tuple(EXPERTS))}
    missing = [name for name in own if name not in saved and name not in left_out and name not in elsewhere]
    unexpected = [name for name in saved if name not in own]
    if missing or unexpected:
        raise UnfitCheckpointError(
            f"{shard.model_file} holds other names than the module: "
            + "; ".join(
                f"{what}: {shortened(names)}"
                for what, names in (("missing there", missing), ("unknown here", unexpected))
                if names
            )
            + ". With `strict_loading = False` on the LightningModule what both have is loaded."
        )


def _reads_in_its_own_way(module: nn.Module) -> bool:
    home = type(module)._load_from_state_dict.__module__
    hooks = module._load_state_dict_pre_hooks
    return bool(hooks) or not home.startswith("torch.") or "_load_from_state_dict" in vars(module)
