# SPDX-License-Identifier: Apache-2.0
"""``DeepSpeedEngine.load_checkpoint`` with everything looked at, on all ranks together, before anything is changed.

Upstream symbols: ``DeepSpeedEngine.load_checkpoint``, replaced on the strategies' engines, and their
``checkpoint_engine.load``, for the length of a call (0.19.7, 0.19.8). Reasons: files are unpickled without a
restriction; a rank that finds its file damaged leaves the others waiting; flat buffers are copied by position,
whatever they are; the weights of ``load_module_only`` aren't loaded, and the tag is passed over. Detected by tests.
Expires when upstream does all that.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.agreement import together
from lightning_zero3.checkpoints import fitness, judging, layout_record, saved_parts, shards, unpickling
from lightning_zero3.checkpoints.other_layout import OtherLayout
from lightning_zero3.checkpoints.places import MODEL, Place, UnfitCheckpointError, find
from lightning_zero3.checkpoints.sharded_weights import (
    ShardedWeights,
    ShardFiles,
    client_state,
    load_sharded,
    warn_of_frozen_left_out,
)
from lightning_zero3.config import SetupError
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology

# Engines that read files of torch.save; others have formats of their own.
_TORCH_FORMAT = ("TorchCheckpointEngine", "FastCheckpointEngine", "DecoupledCheckpointEngine")


def guard(engine: Any, layout: Topology, *, trust: bool, any_layout: bool = False) -> None:
    """Have an engine's own ``load_checkpoint`` look before it loads, and take the tag that it is asked for.

    Args:
        engine: DeepSpeed's engine, with an optimizer or without.
        layout: The run's layout.
        trust: Whether what is in files may be run.
        any_layout: Whether a checkpoint of another layout is read into this one.
    """
    reference = weakref.ref(engine)

    def load_checkpoint(load_dir: Any, tag: Any = None, *arguments: Any, **named: Any) -> tuple[str, Any]:
        alive = reference()
        assert alive is not None
        return load(alive, load_dir, tag, *arguments, layout=layout, trust=trust, any_layout=any_layout, **named)

    engine.load_checkpoint = load_checkpoint


def load(
    engine: Any,
    load_dir: str | Path,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    *,
    layout: Topology,
    trust: bool,
    any_layout: bool = False,
) -> tuple[str, dict[str, Any]]:
    """As ``DeepSpeedEngine.load_checkpoint``, or not at all.

    Args:
        engine: DeepSpeed's engine.
        load_dir: A checkpoint, or a tag's own folder in one.
        tag: Which; None takes ``latest``'s.
        load_module_strict: Whether names must be the same.
        load_optimizer_states: Whether the optimizer goes on where it was; else masters take the weights' values.
        load_lr_scheduler_states: Whether the engine's own scheduler does.
        load_module_only: Whether weights are all that is loaded; counters stay as they are.
        custom_load_fn: As DeepSpeed's; with optimizer states only.
        layout: The run's layout.
        trust: Whether what is in files may be run.
        any_layout: Whether a checkpoint of another layout is read into this one.

    Returns:
        The model file's path, and what isn't DeepSpeed's own in it.

    Raises:
        DamagedCheckpointError: A file isn't what was saved.
        UntrustedCheckpointError: A file holds something that would have to be run to be read.
        UnfitCheckpointError: The checkpoint isn't of this module and layout.
        NoCheckpointError: There is none, or none with that tag.
        SetupError: ``custom_load_fn`` without optimizer states; an unknown format.
    """
    _refuse_formats_of_their_own(engine, trust)
    has_optimizer = hasattr(engine.optimizer, "fp16_groups")
    whole = has_optimizer and load_optimizer_states and not load_module_only
    if engine.load_universal_checkpoint():
        place = _look_at_universal(load_dir, tag, layout, trust)
    elif (
        whole and any_layout and (place := find_together(load_dir, tag)) and _is_of_another_layout(engine, place, trust)
    ):
        return _load_other_layout(
            engine,
            place,
            layout,
            trust=trust,
            strict=load_module_strict,
            lr_scheduler=load_lr_scheduler_states,
        )
    elif whole:
        place, left_out = _look_at_own(engine, load_dir, tag, trust, load_module_strict)
        load_module_strict = load_module_strict and not left_out
    else:
        if custom_load_fn is not None:
            raise SetupError(
                "custom_load_fn is called by a load with optimizer states only: leave it out, or load_module_only and "
                "load_optimizer_states=False."
            )
        return _load_weights(
            engine,
            find_together(load_dir, tag),
            layout,
            trust=trust,
            strict=load_module_strict,
            counters=not load_module_only,
            lr_scheduler=load_lr_scheduler_states,
        )

    def read(path: Any, map_location: Any = None) -> Any:
        return unpickling.read(Path(path), trust=trust, map_location=map_location or "cpu")

    with substituted(engine.checkpoint_engine, "load", read):
        loaded: tuple[str, dict[str, Any]] = type(engine).load_checkpoint(
            engine,
            str(place.folder),
            place.tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
    (loaded[1] or {}).pop(layout_record.SAVED, None)
    return loaded


def find_together(path: str | Path, tag: Any = None) -> Place:
    """:func:`~lightning_zero3.checkpoints.places.find`, on all ranks.

    Args:
        path: A checkpoint, or a tag's own folder in one.
        tag: Which; None takes ``latest``'s.

    Raises:
        NoCheckpointError: There is none.
        UnfitCheckpointError: Ranks see different ones.
    """
    places = together(lambda: find(path, tag))
    if len({place.tag for place in places}) > 1:
        raise UnfitCheckpointError(
            f"Ranks see different checkpoints in {path}: {', '.join(sorted({place.tag for place in places}))}."
        )
    return find(path, tag)


def read_weights(
    module: Any, place: Place, layout: Topology, rank: int, *, strict: bool, trust: bool
) -> dict[str, Any]:
    """Load a checkpoint's weights into a module, on all ranks or on none.

    Args:
        module: The root module, with its engine's layers in place.
        place: The checkpoint.
        layout: The run's layout.
        rank: This rank.
        strict: Whether names that only one of both has are an error.
        trust: Whether what is in files may be run.

    Returns:
        What one of its model files holds, this rank's where it has one.

    Raises:
        DamagedCheckpointError: A file isn't what was saved.
        UntrustedCheckpointError: A file holds something that would have to be run to be read.
        UnfitCheckpointError: The weights don't belong to this module or this layout.
    """
    weights: list[ShardedWeights] = []

    def look() -> tuple[bool, list[Any]]:
        files = ShardFiles(place, layout, rank)
        verified, facts = True, []
        # Each file is looked at by one rank, whoever reads it afterwards.
        for model_file, optimizer_file in files.to_verify:
            verified = judging.verify(place, [model_file, optimizer_file]) and verified
            with judging.as_known(optimizer_file):
                facts += shards.facts(shards.open_shard(model_file, optimizer_file, trust=trust))
        with judging.as_known(files.model_file):
            weights.append(load_sharded(module, files, strict=strict, trust=trust))
        return verified, facts

    judging.judge(place, together(look))
    (found,) = weights
    found.apply()
    # What goes on living mustn't lie in a file that somebody may write to.
    return found.model if trust else copy.deepcopy(found.model)


def _load_weights(
    engine: Any,
    place: Place,
    layout: Topology,
    *,
    trust: bool,
    strict: bool,
    counters: bool,
    lr_scheduler: bool,
) -> tuple[str, dict[str, Any]]:
    model = read_weights(engine.module, place, layout, engine.global_rank, strict=strict, trust=trust)
    if counters and hasattr(engine.optimizer, "fp16_groups"):
        _take_counters(engine, model, lr_scheduler)
    left = {name: value for name, value in model.items() if name not in ("module", layout_record.SAVED)}
    return str(place.shards), left


def _take_counters(engine: Any, model: Mapping[str, Any], lr_scheduler: bool) -> None:
    engine.global_steps, engine.skipped_steps = model["global_steps"], model["skipped_steps"]
    engine.global_samples = model.get("global_samples", engine.global_steps * engine.train_batch_size())
    if lr_scheduler and engine.lr_scheduler is not None and model.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])


def _is_of_another_layout(engine: Any, place: Place, trust: bool) -> bool:
    """Whether DeepSpeed can't read it as it is; asked of all ranks, whose answer is one."""

    def look() -> bool:
        files = fitness.own_files(engine, place)
        if fitness.saved_ranks(place) != fitness.own_ranks(engine) or not all(path.is_file() for path in files):
            return True
        with judging.as_known(files[0]):
            try:
                fitness.require_fit(engine, shards.open_shard(*files, trust=trust))
            except UnfitCheckpointError:
                return True
        return False

    return any(together(look))


def _load_other_layout(
    engine: Any,
    place: Place,
    layout: Topology,
    *,
    trust: bool,
    strict: bool,
    lr_scheduler: bool,
) -> tuple[str, dict[str, Any]]:
    found: list[OtherLayout] = []
    models: list[dict[str, Any]] = []

    def look() -> tuple[bool, list[Any]]:
        every = saved_parts.files_of(place)
        verified, facts = True, []
        rank = engine.global_rank
        for both in every[rank :: layout.world_size]:
            verified = judging.verify(place, list(both)) and verified
            with judging.as_known(both[0]):
                facts += shards.facts(shards.open_shard(*both, trust=trust))
        with judging.as_known(every[0][0]):
            saved = saved_parts.open_all(every, trust=trust)
            # Lightning's entries: this rank's own, where there are as many ranks.
            own = saved.shards[rank if len(every) == layout.world_size else 0]
            found.append(OtherLayout(engine, saved, strict=strict))
        models.append(unpickling.read(own.model_file, trust=trust))
        return verified, facts

    judging.judge(place, together(look))
    found[0].apply()
    _take_counters(engine, models[0], lr_scheduler)
    taken = found[0].described(layout)
    rank_zero_warn(f"{place.shards} is of another layout, and was read into this one: {taken}.")
    return str(place.shards), client_state(models[0])


def _look_at_own(engine: Any, load_dir: Any, tag: Any, trust: bool, strict: bool) -> tuple[Place, list[str]]:
    """Look at the files that DeepSpeed will read on this rank; which frozen parameters aren't there."""
    place = find_together(load_dir, tag)
    left_out: list[str] = []

    def look() -> tuple[bool, list[Any]]:
        fitness.require_same_ranks(engine, place, trust=trust)
        files = list(fitness.own_files(engine, place))
        swapped = fitness.swapped_files(engine, place)
        more = [] if swapped is None else [path for path in swapped.rglob("*") if path.is_file()]
        verified = judging.verify(place, files, more)
        with judging.as_known(files[0]):
            shard = shards.open_shard(files[0], files[1], trust=trust)
            fitness.require_fit(engine, shard)
            left_out.extend(fitness.frozen_left_out(engine.module, shard.model))
            if strict:
                fitness.require_same_names(engine.module, shard, left_out)
            return verified, shards.facts(shard)

    judging.judge(place, together(look))
    if left_out:
        warn_of_frozen_left_out(left_out)
    return place, left_out


def _look_at_universal(load_dir: Any, tag: Any, layout: Topology, trust: bool) -> Place:
    """Look at all files of a Universal Checkpoint, which DeepSpeed reads without a restriction; shared out to ranks."""
    import torch

    place = find(load_dir, tag, universal=True)
    rank = torch.distributed.get_rank()

    def look() -> None:
        files = sorted([*place.shards.glob(f"*{MODEL}"), *(place.shards / "zero").rglob("*.pt")])
        for path in files[rank :: layout.world_size]:
            unpickling.check_sums(path)
            unpickling.read(path, trust=trust, mapped=True)

    together(look)
    return place


def _refuse_formats_of_their_own(engine: Any, trust: bool) -> None:
    theirs = getattr(engine, "checkpoint_engine", None)  # an engine without an optimizer may have none
    name = type(theirs).__name__
    if theirs is not None and name not in _TORCH_FORMAT and not trust:
        raise SetupError(
            f"{name} writes a format of its own, which can't be looked at before it is loaded. Pass "
            "trust_checkpoint=True to load it all the same."
        )
