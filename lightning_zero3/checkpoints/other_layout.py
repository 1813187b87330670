# SPDX-License-Identifier: Apache-2.0
"""A training engine's state out of a checkpoint of another layout: other numbers of ranks, other expert or slice sizes.

Masters and the optimizer's states are read straight from the sharded files, each rank what it keeps and nothing else,
and put together to what a checkpoint of this run's own layout would hold. Nothing is written beside the checkpoint, no
number is computed: each element is copied once.

Upstream symbols: ``load_state_dict``, ``_zero3_partition_group_metadata``, ``sub_group_to_group_id``,
``fp32_partitioned_groups_flat``, ``swap_optimizer`` and ``checkpoint_event_epilogue`` of
``DeepSpeedZeroOptimizer_Stage3`` (0.19.7, 0.19.8). Reason: ``ds_to_universal`` writes every tensor once more, whole,
and the engine reads those whole on every rank; what it refuses is in docs/checkpoints.md. Detected by tests. Expires
when upstream loads another layout without a conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_zero3.checkpoints.fitness import require_same_settings
from lightning_zero3.checkpoints.layout_record import Range, ranges_of
from lightning_zero3.checkpoints.places import UnfitCheckpointError
from lightning_zero3.checkpoints.saved_parts import Copy, Part, SavedParts
from lightning_zero3.checkpoints.sharded_weights import warn_of_frozen_left_out
from lightning_zero3.config import SetupError
from lightning_zero3.listing import first_few
from lightning_zero3.moe.own_part import own_part
from lightning_zero3.topology import Topology

_NAMED = 5
# Counts steps in the last sub-group of each parameter group only.
_COUNTS_IN_ONE = "FusedAdam"
# What AutoEP calls the groups that it makes of the user's is each run's own.
_OWN = ("params", "name", "moe")


@dataclass(frozen=True)
class _Wanted:
    """A parameter here, and where its elements are."""

    name: str
    tensor: torch.Tensor
    range: Range
    copies: list[Copy]
    like: Part

    def partition(self, kind: str | None) -> torch.Tensor:
        """This rank's partition of it, zeros where it is padding."""
        values = torch.zeros(self.range.size, dtype=self.like.values(kind).dtype)
        for copy in self.copies:
            copy.into(values, self.range.shape, self.range.start, kind)
        return values


class OtherLayout:
    """What an engine is to take from a checkpoint of another layout; looked at, and not taken yet.

    Args:
        engine: An engine with an optimizer.
        saved: The checkpoint's files.
        strict: Whether names that only one of both has are an error.

    Raises:
        UnfitCheckpointError: The checkpoint isn't of this module and optimizer, or can't be read into this layout.
        SetupError: This engine keeps its optimizer on NVMe, or doesn't say which part of a layer a rank holds.
    """

    def __init__(self, engine: Any, saved: SavedParts, *, strict: bool) -> None:
        self._engine, self._saved, self._optimizer = engine, saved, engine.optimizer
        if getattr(self._optimizer, "swap_optimizer", False):
            raise SetupError('resume_layout="universal" can\'t read into an optimizer on NVMe: offload it to the CPU.')
        named = ranges_of(engine.module)
        names_of: dict[int, list[str]] = {}
        for name, (tensor, _) in named.items():
            names_of.setdefault(id(tensor), []).append(name)
        self._named, self._names_of = named, names_of
        self._buffers = {n: pair for n, pair in named.items() if not isinstance(pair[0], torch.nn.Parameter)}
        self._frozen = self._look_at_frozen()
        self._sub_groups = [[self._wanted(each) for each in group] for group in self._optimizer.fp16_groups]
        self._require_no_more()
        self._kinds = self._kinds_of_states()
        self._states = [self._state_of(index) for index in range(len(self._sub_groups))]
        self._groups = self._hyperparameters()
        self._values = self._beside(strict)

    def apply(self) -> None:
        """Take it: weights, masters, states, buffers and counters; on all ranks."""
        from torch import distributed

        optimizer, first = self._optimizer, self._saved.shards[0]
        for wanted in self._frozen:
            with own_part(wanted.tensor) as part:
                part.fill(wanted.partition(None))
        flats, states = [], {}
        for index, group in enumerate(self._sub_groups):
            flats.append(torch.cat([each.partition(None) for each in group]))
            # Each its own: several sub-groups' counts may be one storage in a file, and nothing stays in the file.
            states[index] = {n: v.clone() if torch.is_tensor(v) else v for n, v in self._states[index].items()}
            for kind in self._kinds:
                states[index][kind] = torch.cat([each.partition(kind) for each in group])
        content = {
            **{name: first.optimizer[name] for name in ("loss_scaler", "dynamic_loss_scale", "overflow")},
            "optimizer_state_dict": {"state": states, "param_groups": self._groups},
            "fp32_flat_groups": flats,
        }
        if (metadata := optimizer._zero3_partition_group_metadata()) is not None:
            content["ds_zero_partition_groups"] = metadata
        rank = distributed.get_rank(group=optimizer.dp_process_group)
        optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict(state_dict_list={rank: content}, load_optimizer_states=True)
        for tensor, value in self._values:
            tensor.data.copy_(value)
        optimizer.checkpoint_event_epilogue()

    def described(self, layout: Topology) -> str:
        """What differs, for a message.

        Args:
            layout: This run's.
        """
        here = asdict(layout)
        here["ranks"] = here.pop("world_size")
        saved = self._saved.sizes or {"ranks": len(self._saved.shards)}
        parts = [f"{name} {value} → {here[name]}" for name, value in saved.items() if here.get(name, value) != value]
        return ", ".join(parts) or "another order of parameters, or other groups"

    def _wanted(self, tensor: torch.Tensor) -> _Wanted:
        for name in self._names_of[id(tensor)]:
            range_ = self._named[name][1]
            if range_.held.name in self._saved.parts:
                like = self._saved.parts[range_.held.name][0]
                wanted = _Wanted(name, tensor, range_, self._saved.copies(range_.held.name, range_), like)
                frozen = like.sub_group is None
                if frozen is tensor.requires_grad:
                    raise UnfitCheckpointError(
                        f"{name} is {'frozen' if frozen else 'trained'} in {self._folder} and "
                        f"{'trained' if frozen else 'frozen'} here. Resume with what that run has frozen."
                    )
                return wanted
        name = self._names_of[id(tensor)][0]
        raise UnfitCheckpointError(
            f"{self._folder} doesn't hold {name} ({self._named[name][1].held.name}): it is another module's."
        )

    def _look_at_frozen(self) -> list[_Wanted]:
        frozen = {id(p): p for _, p in self._engine.module.named_parameters() if not p.requires_grad}
        if self._saved.shards[0].model.get("frozen_param_shapes"):
            return [self._wanted(each) for each in frozen.values()]
        if frozen:
            warn_of_frozen_left_out([self._names_of[each][0] for each in frozen])
        return []

    def _require_no_more(self) -> None:
        here = {range_.held.name for _, range_ in self._named.values()}
        if unknown := sorted(set(self._saved.parts) - here):
            raise UnfitCheckpointError(f"{self._folder} holds parameters that this module lacks: {first_few(unknown)}.")

    @property
    def _folder(self) -> Any:
        return self._saved.shards[0].model_file.parent

    def _sources(self, index: int) -> set[tuple[int, int]]:
        """Ranks and sub-groups that a sub-group here is made of; all that hold its tensors, so on all ranks alike."""
        ranks = {id(shard): rank for rank, shard in enumerate(self._saved.shards)}
        return {
            (ranks[id(part.shard)], part.sub_group)
            for wanted in self._sub_groups[index]
            for part in self._saved.parts[wanted.range.held.name]
            if part.sub_group is not None
        }

    def _inner(self, rank: int) -> Mapping[str, Any]:
        shard = self._saved.shards[rank]
        inner = shard.optimizer.get("optimizer_state_dict")
        if inner is None:
            raise UnfitCheckpointError(
                f"{shard.optimizer_file} holds weights only (save_weights_only=True), and no optimizer states to go on "
                "with."
            )
        found: Mapping[str, Any] = inner
        return found

    def _kinds_of_states(self) -> list[str]:
        """States with a number for each element, as moments are; those of this optimizer and of the files are alike."""
        here = {
            name
            for state in self._optimizer.optimizer.state.values()
            for name, value in state.items()
            if torch.is_tensor(value) and value.dim() > 0
        }
        there: set[str] = set()
        for rank, shard in enumerate(self._saved.shards):
            flats = shard.optimizer["fp32_flat_groups"]
            for sub_group, state in self._inner(rank)["state"].items():
                for name, value in state.items():
                    if not torch.is_tensor(value) or value.dim() == 0:
                        continue
                    if value.dim() != 1 or value.numel() != flats[sub_group].numel():
                        raise UnfitCheckpointError(
                            f"{shard.optimizer_file} holds {name} of shape {tuple(value.shape)} for "
                            f"{flats[sub_group].numel():,} weights: it isn't one number per weight, so it belongs to "
                            "its layout. Resume with the layout that it was saved with."
                        )
                    there.add(name)
        # An optimizer makes its states when it takes its first step.
        if here and here != there:
            raise UnfitCheckpointError(
                f"{self._folder} holds the optimizer states {sorted(there)}, and this run's "
                f"{type(self._optimizer.optimizer).__name__} has {sorted(here)}. Resume with that run's optimizer."
            )
        return sorted(there)

    def _state_of(self, index: int) -> dict[str, Any]:
        """What a sub-group has one of, as its number of steps."""
        found: dict[str, list[Any]] = {}
        for rank, sub_group in sorted(self._sources(index)):
            inner = self._inner(rank)
            counted = [sub_group]
            if type(self._optimizer.optimizer).__name__ == _COUNTS_IN_ONE:
                counted = next(group["params"] for group in inner["param_groups"] if sub_group in group["params"])
            states = [inner["state"].get(each, {}) for each in counted]
            for name in {name for state in states for name in state} - set(self._kinds):
                found.setdefault(name, []).append(max(state[name] for state in states if name in state))
        return {name: _alike(values, f"{name} of {self._said(index)}") for name, values in found.items()}

    def _said(self, index: int) -> str:
        return ", ".join(each.name for each in self._sub_groups[index][:2])

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """This optimizer's parameter groups, with the files' settings for their parameters."""
        ids, groups = self._optimizer.sub_group_to_group_id, []
        for number, own in enumerate(self._optimizer.optimizer.param_groups):
            members = [index for index in range(len(self._sub_groups)) if ids[index] == number]
            settings = []
            for rank, sub_group in sorted({each for index in members for each in self._sources(index)}):
                there = next(g for g in self._inner(rank)["param_groups"] if sub_group in g["params"])
                require_same_settings(self._optimizer.optimizer, there, self._saved.shards[rank].optimizer_file)
                settings.append({name: value for name, value in there.items() if name not in _OWN and name in own})
            what = "" if not members else self._said(members[0])
            taken = _alike(settings, f"the parameter group of {what}") if settings else {}
            groups.append({**own, **taken, "params": members})
        return groups

    def _beside(self, strict: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        values, missing = [], []
        for name, (tensor, range_) in self._buffers.items():
            value = self._saved.buffers.get(range_.held.name)
            if value is None:
                missing.append(name)
            elif tuple(value.shape) == tuple(tensor.shape):
                values.append((tensor, value))
            elif not _is_autoeps(name):
                raise UnfitCheckpointError(
                    f"{name} is {tuple(value.shape)} in {self._folder} and {tuple(tensor.shape)} here."
                )
        missing = [name for name in missing if not _is_autoeps(name)]
        if strict and missing:
            raise UnfitCheckpointError(
                f"{self._folder} lacks {', '.join(missing[:_NAMED])}. With `strict_loading = False` on the "
                "LightningModule what both have is loaded."
            )
        return values


def _is_autoeps(name: str) -> bool:
    """AutoEP's own balance of the experts, which Transformers' layers don't have and which begins anew."""
    return name.endswith(".expert_bias")


def _alike(values: Iterable[Any], what: str) -> Any:
    first, *others = values
    if any(str(each) != str(first) for each in others):
        different = next(each for each in others if str(each) != str(first))
        raise UnfitCheckpointError(
            f"In the checkpoint, {what} here are of several parts, with {first} and {different}: they can't be one "
            "here. Resume with the parameter groups that it was saved with."
        )
    return first
