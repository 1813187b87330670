# SPDX-License-Identifier: Apache-2.0
"""A sharded checkpoint into a Hugging Face folder, in one process, whatever number of ranks has saved it.

DeepSpeed's ``zero_to_fp32`` refuses experts that are shared out, and knows nothing of slices. Here each tensor of
Transformers' model is put together from the files of all ranks, which are mapped into memory, and written before the
next one is.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.checkpoints import commit, judging, layout_record, shards
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
from lightning_zero3.checkpoints.places import MODEL, OPTIMIZER, Place, UnfitCheckpointError, find
from lightning_zero3.checkpoints.saved_layout import SavedLayout
from lightning_zero3.checkpoints.shards import Shard
from lightning_zero3.listing import first_few
from lightning_zero3.moe.adapter_export import MERGE, ONLY, Outline, require_known
from lightning_zero3.moe.adapters import Adapters, base_name, config_of, copied_from, from_record, is_added
from lightning_zero3.moe.export import ExportReport, finish, require_folders, write_parts
from lightning_zero3.moe.export_contents import Contents, contents_with, held_as_named, sources_of
from lightning_zero3.moe.export_folder import ExportFolder, require_free
from lightning_zero3.moe.safetensors_files import WeightFiles
from lightning_zero3.moe.weight_names import LayerNames, of_layers
from lightning_zero3.moe.weight_pieces import Held, Piece, covering

_FILE = re.compile(rf"zero_pp_rank_(\d+)_mp_rank_(\d+){re.escape(MODEL)}")
_ADAPTER = re.compile(r"\.lora_[A-Za-z_]+\.([^.]+)(?:\.weight)?$")
_LISTED = 5


@dataclass(frozen=True)
class _Part:
    """A piece, and its values in a mapped file."""

    piece: Piece
    values: torch.Tensor


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    model: Any,
    *,
    dtype: str = "fp32",
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
    copied_from: Sequence[Path] = (),
    overwrite: bool = False,
    trust: bool = False,
    adapters: str = MERGE,
    adapter_config: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a checkpoint's weights as ``save_pretrained`` of Transformers' own model would.

    Args:
        checkpoint: A checkpoint of ZeRO stage 3, of this package's strategies or of stock's.
        out: The folder that is written.
        model: Transformers' model as its config builds it, on the meta device: its names and shapes are what is needed.
        dtype: ``"fp32"`` for the masters, ``"bf16"`` or ``"fp16"`` for them rounded.
        max_shard_size: The most bytes of a file.
        base: The folder that the model was loaded from, whose other tensors, names and config are taken over.
        copied_from: Folders whose tokenizer files and generation_config.json are copied; the first that has one counts.
        overwrite: Whether an earlier export at the path is replaced.
        trust: Whether what is in the checkpoint's files may be run.
        adapters: Of a model with a LoRA of PEFT's: ``"merge"`` for the model with it in its weights, ``"only"`` for the
            adapter alone.
        adapter_config: Fields of its adapter_config.json, where the checkpoint doesn't say them: stock's doesn't.

    Returns:
        What was written.

    Raises:
        NoCheckpointError: There is no checkpoint.
        DamagedCheckpointError: A file of it isn't what was saved.
        UntrustedCheckpointError: A file holds something that would have to be run to be read.
        UnfitCheckpointError: It isn't one of this model.
        SetupError: It can't be written as asked.
    """
    began = time.perf_counter()
    require_folders(base, *copied_from)
    require_free(Path(out), overwrite=overwrite, alone=adapters == ONLY, made_from=(base, *copied_from))
    require_known(adapters)
    base_files = None if base is None else WeightFiles(base)
    place = find(commit.survivor(Path(checkpoint)))
    every = dict(_open(place, trust))
    found = _adapters(place, every, adapter_config)
    outline = None if found is None else Outline(model, found)
    merging = outline if adapters == MERGE else None
    tensors = held_as_named(model, merging)
    names = {each.name for _, each in tensors.values()}
    trained = [] if outline is None else _trained(next(iter(every.values())), names)
    contents = contents_with(outline, adapters, model, sources_of(tensors), dtype, base_files, trained)
    held = _held(place, every, contents, model, merging)
    plan = {
        source.names[0]: covering(source.names[0], source.shape, held[source.names[0]])
        for output in contents.outputs
        for source in output.sources
    }
    only = outline if adapters == ONLY else None
    described = contents.tensors(base_files)
    folder = ExportFolder(Path(out), described, max_shard_size, parameters=contents.parameters, outline=only)
    try:
        for output in contents.outputs:
            values = {each.names[0]: _whole(each.shape, plan[each.names[0]]) for each in output.sources}
            write_parts(folder, output, values, outline)
        folders = [*copied_from, *([] if base is None else [Path(base)])]
        return finish(folder, model, contents, base_files, folders, dtype, began, outline)
    except BaseException:
        folder.abandon()
        raise


def _whole(shape: Sequence[int], parts: Sequence[Held[_Part]]) -> torch.Tensor:
    whole = torch.empty(tuple(shape), dtype=parts[0].where.values.dtype)
    for each in parts:
        each.piece.place(each.where.values, whole)
    return whole


def _adapters(place: Place, every: Mapping[Any, Shard], given: Mapping[str, Any] | None) -> Adapters | None:
    """What the checkpoint says of adapters, or else the user."""
    shard = next(iter(every.values()))
    recorded = (shard.model.get(layout_record.SAVED) or {}).get(layout_record.ADAPTERS) or {}
    names = [name for group in shard.model["param_shapes"] for name in group]
    if len(recorded) > 1:
        raise UnfitCheckpointError(f"{place.shards} holds several models with adapters: {', '.join(recorded)}.")
    if recorded:
        return from_record(next(iter(recorded.values())))
    if given is not None:
        owners = {match[1] for name in names if (match := _ADAPTER.search(name)) is not None}
        if len(owners) != 1:
            raise UnfitCheckpointError(f"{place.shards} has adapters {', '.join(sorted(owners)) or 'none'}, not one.")
        return Adapters(dict.fromkeys(owners, config_of(given)), tuple(owners))
    if any(map(is_added, names)):
        raise UnfitCheckpointError(
            f"{place.shards} has PEFT's adapters and doesn't say of which kind: it wasn't saved by zero3_fast. Give "
            "--adapter_config, the adapter_config.json that LoraConfig(...).save_pretrained(folder) writes."
        )
    return None


def _trained(shard: Shard, names: set[str]) -> list[str]:
    """Those of a model's tensors that the checkpoint's run has trained."""
    layers = LayerNames.like(names)
    theirs = {base_name(of_layers(name, layers)[0]) for group in shard.model["param_shapes"] for name in group}
    return [name for name in names if any(each == name or each.endswith(f".{name}") for each in theirs)]


def _held(
    place: Place, every: dict[tuple[int, int], Shard], contents: Contents, model: Any, merging: Outline | None
) -> dict[str, list[Held[_Part]]]:
    """All that the files hold of each tensor, by its first name."""
    sources = [source for output in contents.outputs for source in output.sources]
    shapes = {name: source.shape for source in sources for name in source.names}
    first = {name: source.names[0] for source in sources for name in source.names}
    layers = LayerNames.like(shapes)
    with judging.as_known(place.shards):
        layout = SavedLayout(every, place.shards)
        buffers = {name for shard in every.values() for name in shard.model.get("buffer_names") or ()}
        called = _Called(layers, merging)
        known = {called(name)[0] for name in (*layout.names, *buffers)}
        prefix = _prefix(known, shapes, place, type(model).__name__)
        found: dict[str, list[Held[_Part]]] = defaultdict(list)
        for rank in every:
            for name, local, start, values in layout.parameters(rank):
                theirs, expert = called(name)
                theirs = theirs.removeprefix(prefix) if theirs.startswith(prefix) else ""
                if theirs not in shapes:
                    continue
                blocks = layout.blocks(rank, name, local, shapes[theirs], expert)
                stop = min(start + values.numel(), torch.Size(local).numel())
                piece = Piece(tuple(local), min(start, stop), stop, blocks)
                found[first[theirs]].append(Held(_Part(piece, values), piece))
            for name, values in layout.buffers(rank):
                theirs = called(name)[0]
                theirs = theirs.removeprefix(prefix) if theirs.startswith(prefix) else ""
                if theirs in shapes:
                    shape = tuple(values.shape)
                    piece = Piece(shape, 0, values.numel(), layout.whole(name, shape, shapes[theirs]))
                    found[first[theirs]].append(Held(_Part(piece, values.reshape(-1)), piece))
    missing = [source.names[0] for source in sources if not found[source.names[0]]]
    if missing:
        raise UnfitCheckpointError(
            f"{place.shards} isn't of this {type(model).__name__}, or was saved without frozen parameters. It lacks "
            f"{first_few(missing)}."
            + (" Of an adapter that was saved alone, --adapters only writes all." if merging is not None else "")
        )
    return found


@dataclass(frozen=True)
class _Called:
    """What Transformers' model calls a checkpoint's tensor, with all that is before the model's name."""

    layers: LayerNames
    merging: Outline | None

    def __call__(self, name: str) -> tuple[str, str | None]:
        theirs, expert = of_layers(name, self.layers)
        if self.merging is None:
            return base_name(theirs), expert
        # The name in the model isn't known yet, and what is before it doesn't matter.
        if (original := copied_from(theirs, self.merging.name)) is not None:
            return original, expert
        return (theirs if self.merging.has_copy(theirs) else base_name(theirs)), expert


def _prefix(known: set[str], shapes: Mapping[str, Any], place: Place, model: str) -> str:
    """Where the module that was trained has the model."""
    longest = max(shapes, key=lambda name: (name.count("."), name))
    prefixes = sorted({name.removesuffix(longest) for name in known if name.endswith(longest)})
    fitting = [each for each in prefixes if each == "" or each.endswith(".")]
    counts = {each: sum(each + name in known for name in shapes) for each in fitting}
    if not counts:
        raise UnfitCheckpointError(
            f"{place.shards} isn't of this {model}: nothing in it is called {longest}. It has "
            f"{', '.join(sorted(known)[:_LISTED])}, and more. Is it the config of the model that was trained?"
        )
    best = max(counts.values())
    chosen = [each for each, count in counts.items() if count == best]
    if len(chosen) > 1:
        raise UnfitCheckpointError(f"{place.shards} holds several such models: {', '.join(chosen)}.")
    return chosen[0]


def _open(place: Place, trust: bool) -> Iterator[tuple[tuple[int, int], Shard]]:
    """Every rank's files, looked at and mapped: data-parallel and tensor-parallel rank → files."""
    names = {path.name: path for path in place.shards.glob(f"*{MODEL}")}
    found = {name: _FILE.search(name) for name in names}
    odd = sorted(name for name, match in found.items() if match is None)
    if odd:
        raise UnfitCheckpointError(
            f"{names[odd[0]]} isn't a file of ZeRO stage 3 with partitioned weights. Give a checkpoint, not a "
            "Universal Checkpoint or one of another stage."
        )
    ranks = {(int(match[1]), int(match[2])): names[name] for name, match in found.items() if match is not None}
    wanted = {(dp, mp) for dp in range(max(r[0] for r in ranks) + 1) for mp in range(max(r[1] for r in ranks) + 1)}
    for dp, mp in sorted(wanted - set(ranks)):
        raise DamagedCheckpointError(f"{place.shards / f'zero_pp_rank_{dp}_mp_rank_{mp:02d}{MODEL}'} is missing.")
    facts, verified = [], True
    for rank, path in sorted(ranks.items()):
        optimizer = path.with_name(path.name.removesuffix(MODEL) + OPTIMIZER)
        bf16 = optimizer.with_name(f"bf16_{optimizer.name.removeprefix('bf16_')}")
        optimizer = bf16 if bf16.is_file() else optimizer
        verified = judging.verify(place, [path, optimizer]) and verified
        with judging.as_known(optimizer):
            shard = shards.open_shard(path, optimizer, trust=trust)
            facts += shards.facts(shard)
        if shard.model["dp_world_size"] * max(1, shard.model["mp_world_size"]) != len(ranks):
            raise DamagedCheckpointError(
                f"{path} is one of {shard.model['dp_world_size'] * max(1, shard.model['mp_world_size'])} ranks' files, "
                f"and {len(ranks)} are there."
            )
        yield rank, shard
    judging.judge(place, [(verified, facts)])
