# SPDX-License-Identifier: Apache-2.0
"""A live model, partitioned over ranks in whatever way, into a Hugging Face folder.

Tensor by tensor: each rank sends what it holds of one, and rank 0 puts it together, cuts it into the tensors that files
have, and writes them. No rank holds more than one tensor of Transformers' model, and rank 0 one shard beside it.
DeepSpeed's own export refuses experts that are shared out; Transformers' would save the engine's layers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import distributed as dist
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe.adapter_export import MERGE, ONLY, Outline, outline_of, require_known
from lightning_zero3.moe.adapters import AdapterError, adapters_of, is_wrapper, tuner_layers
from lightning_zero3.moe.export_contents import (
    Contents,
    Output,
    Source,
    contents_with,
    held_as_named,
    precision,
    sources_of,
)
from lightning_zero3.moe.export_folder import ExportFolder, NotExportedError, architecture_of, require_free
from lightning_zero3.moe.export_ranks import Ranks, ranks_together
from lightning_zero3.moe.hugging_face import find_models
from lightning_zero3.moe.own_part import own_values, range_of, require_readable
from lightning_zero3.moe.safetensors_files import WeightFiles
from lightning_zero3.moe.sharded_build import outside_zero_init
from lightning_zero3.moe.weight_pieces import Held, Piece, covering

__all__ = ["ExportReport", "NotExportedError", "save_pretrained"]


@dataclass(frozen=True)
class ExportReport:
    """What an export has written.

    Args:
        path: The folder.
        tensors: How many tensors its files hold.
        files: Their names.
        bytes: Of all tensors.
        dtype: Of the weights.
        architecture: The model's class, or the base checkpoint's.
        carried: Names of the tensors that were copied from the base checkpoint.
        notes: What a user should know.
        seconds: From the first look to the last rename.
    """

    path: str
    tensors: int
    files: tuple[str, ...]
    bytes: int
    dtype: str
    architecture: str
    carried: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """One line."""
        carried = f", {len(self.carried)} of them from the base checkpoint" if self.carried else ""
        done = (
            f"{self.architecture}: {self.tensors} tensors{carried}, {self.bytes / 2**20:,.1f} MiB of {self.dtype} in "
            f"{len(self.files)} file{'s' * (len(self.files) != 1)}, written to {self.path} in {self.seconds:.1f} s"
        )
        return "; ".join([done, *self.notes])


def save_pretrained(
    module: nn.Module,
    path: str | Path,
    *,
    dtype: str = "fp32",
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    adapters: str = MERGE,
) -> ExportReport | None:
    """Write a model as ``save_pretrained`` of Transformers' own would, from all ranks; call it on all of them.

    The model may be whole, partitioned by ``zero.Init``, or an engine's, with its experts and layers shared out.

    Args:
        module: A Hugging Face model, or a module that holds one.
        path: The folder that is written, on rank 0.
        dtype: ``"fp32"`` for the masters, ``"bf16"`` or ``"fp16"`` for them rounded.
        max_shard_size: The most bytes of a file.
        base: The folder that the model was loaded from, whose other tensors, names and config are taken over. Without
            it the model's own class is written, for a composite checkpoint's text model the text model alone.
        tokenizer: A folder whose tokenizer files, and generation_config.json, are copied; by default ``base``.
        overwrite: Whether an earlier export at the path is replaced.
        adapters: Of a model with a LoRA of PEFT's: ``"merge"`` for the model with it in its weights, ``"only"`` for the
            adapter alone, which ``PeftModel.from_pretrained`` loads.

    Returns:
        What was written, on rank 0; None elsewhere.

    Raises:
        SetupError: The model can't be exported, or not to there; on all ranks, before anything is written.
        NotExportedError: Writing has failed; on all ranks.
    """
    began = time.perf_counter()
    with outside_zero_init(), ranks_together() as ranks:
        mine = ranks.agreed(lambda: _look(module, Path(path), dtype, base, tokenizer, overwrite, adapters))
        everywhere = ranks.gathered(mine.pieces)
        base_files = None if base is None else WeightFiles(base)
        plan = ranks.from_first(
            lambda: {
                source.names[0]: covering(
                    source.names[0],
                    source.shape,
                    [
                        Held((rank, name), piece)
                        for rank, theirs in enumerate(everywhere)
                        for each in source.names
                        for name, piece in theirs.get(each, {}).items()
                    ],
                )
                for output in mine.contents.outputs
                for source in output.sources
            }
        )
        folders = [Path(each) for each in (tokenizer, base) if each is not None]
        folder: ExportFolder | None = None
        report = None
        try:
            if ranks.rank == 0:
                with ranks.noted():
                    folder = ExportFolder(
                        Path(path),
                        mine.contents.tensors(base_files),
                        max_shard_size,
                        parameters=mine.contents.parameters,
                        outline=mine.outline if adapters == ONLY else None,
                    )
            for output in mine.contents.outputs:
                ranks.go_on()
                whole = {
                    each.names[0]: _assemble(each, plan[each.names[0]], mine.tensors, ranks) for each in output.sources
                }
                with ranks.noted():
                    if folder is not None:
                        write_parts(folder, output, {n: v for n, v in whole.items() if v is not None}, mine.outline)
            ranks.go_on()
            with ranks.noted():
                if folder is not None:
                    report = finish(folder, mine.model, mine.contents, base_files, folders, dtype, began, mine.outline)
            ranks.go_on()
        except BaseException:
            if folder is not None:
                folder.abandon()
            raise
    if report is not None:
        rank_zero_info(str(report))
    return report


@dataclass
class _Mine:
    """What this rank holds: Transformers' name → the model's own name → piece; and the tensors by the model's names."""

    model: Any
    outline: Outline | None
    contents: Contents
    pieces: dict[str, dict[str, Piece]]
    tensors: dict[str, torch.Tensor]


def _look(
    module: nn.Module,
    path: Path,
    dtype: str,
    base: str | Path | None,
    tokenizer: str | Path | None,
    overwrite: bool,
    adapters: str,
) -> _Mine:
    found, _ = find_models(module, lambda _: True)
    if len(found) != 1:
        there = ", ".join(f"{name} ({type(model).__name__})" for name, model in found) or "none"
        raise SetupError(
            f"{type(module).__name__} holds not one Hugging Face model but {there}. Pass the one to export."
        )
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        require_free(path, overwrite=overwrite, alone=adapters == ONLY, made_from=(base, tokenizer))
    require_folders(tokenizer)
    model: Any = found[0][1]
    outline = _outline(module, model, adapters)
    held_by_name = held_as_named(model, outline if adapters == MERGE else None)
    base_files = None if base is None else WeightFiles(base)
    trained = [held.name for t, held in held_by_name.values() if t.requires_grad]
    contents = contents_with(outline, adapters, model, sources_of(held_by_name), dtype, base_files, trained)
    pieces: dict[str, dict[str, Piece]] = {}
    for name, (tensor, held) in held_by_name.items():
        part = range_of(tensor)
        require_readable(tensor, masters=precision(dtype) == torch.float32)
        pieces.setdefault(held.name, {})[name] = Piece(part.shape, part.start, part.stop, held.blocks)
    return _Mine(model, outline, contents, pieces, {name: tensor for name, (tensor, _) in held_by_name.items()})


def _outline(module: nn.Module, model: Any, adapters: str) -> Outline | None:
    require_known(adapters)
    found = adapters_of(model)
    if found is not None:
        return outline_of(model, found)
    if next(tuner_layers(model), None) is not None:
        raise AdapterError(
            f"Layers inside of {type(model).__name__} have adapters of PEFT's that it doesn't know of itself. Wrap the "
            "whole model: get_peft_model(model, config)."
        )
    if any(map(is_wrapper, module.modules())):
        raise AdapterError(
            f"{type(module).__name__} has an adapter of PEFT's that isn't in the model's layers, such as a prompt. "
            "LoRA is exported; pass the model inside it to export that alone."
        )
    return None


def require_folders(*paths: str | Path | None) -> None:
    """Refuse a folder that isn't there.

    Args:
        *paths: Folders, or None.

    Raises:
        SetupError: One isn't there.
    """
    for path in paths:
        if path is not None and not Path(path).is_dir():
            raise SetupError(f"{path} is no folder.")


def _assemble(
    source: Source, held: Sequence[Held[tuple[int, str]]], tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> torch.Tensor | None:
    """On rank 0 the whole tensor; elsewhere None, when what this rank holds is sent."""
    kept = source.dtype
    carried = torch.float32 if kept.is_floating_point and kept != torch.float64 else kept
    whole = torch.empty(source.shape, dtype=carried) if ranks.rank == 0 else None
    for each in held:
        rank, name = each.where
        values = None
        if rank == ranks.rank:
            values = own_values(tensors[name]).to(carried)
        values = ranks.sent_to_first(values, rank, each.piece.stop - each.piece.start, carried)
        if whole is not None:
            assert values is not None
            each.piece.place(values, whole)
    return whole


def write_parts(
    folder: ExportFolder, output: Output, values: dict[str, torch.Tensor], outline: Outline | None = None
) -> None:
    """Cut a tensor of Transformers' model into those that files have, and write them.

    Args:
        folder: Where to.
        output: What it is called there.
        values: The tensor, and an adapter's that are merged into it first; by name.
        outline: Of a model with adapters.
    """
    name = output.source.names[0]
    whole = values.pop(name)
    if outline is not None and output.added:
        whole = outline.merged(name, whole, values)
    for part in output.parts:
        box = tuple(slice(b, b + n) for b, n in zip(part.block.here, part.block.size, strict=True))
        folder.add(part.name, whole[box])


def finish(
    folder: ExportFolder,
    model: Any,
    contents: Contents,
    base: WeightFiles | None,
    folders: Sequence[Path],
    dtype: str,
    began: float,
    outline: Outline | None = None,
) -> ExportReport:
    """Write what isn't the model's own, and give the folder its name.

    Args:
        folder: With all of the model's tensors.
        model: The Hugging Face model.
        contents: What is in it.
        base: The base checkpoint.
        folders: Where tokenizer and generation config may be.
        dtype: The weights'.
        began: When, by ``time.perf_counter``.
        outline: Of a model with adapters.
    """
    if base is not None:
        for name in contents.carried:
            shape = base.tensors[name].shape
            folder.add(name, base.read(name, (0,) * len(shape), shape))
        base.close()
    folder.write_configs(model, precision(dtype), None if base is None else base.folder, folders)
    folder.finish()
    written = architecture_of(model)
    if base is not None:
        written = next(iter(base.config.get("architectures") or ()), written)
    return ExportReport(
        path=str(folder.path),
        tensors=sum(map(len, folder.files.values())),
        files=tuple(folder.files),
        bytes=folder.bytes,
        dtype=dtype,
        architecture=written,
        carried=tuple(contents.carried),
        notes=_notes(model, base, contents, outline),
        seconds=time.perf_counter() - began,
    )


def _notes(model: Any, base: WeightFiles | None, contents: Contents, outline: Outline | None) -> tuple[str, ...]:
    kind = str(model.config.model_type)
    if outline is not None:
        merged = sum(bool(output.added) for output in contents.outputs)
        of = f"the adapter {outline.name!r}"
        return (f"{of}, merged into {merged} weights" if merged else f"{of} alone, for PeftModel.from_pretrained",)
    if base is None and kind.endswith("_text"):
        return (
            f"the text model alone, as {architecture_of(model)} ({kind}): give base=DIR for the checkpoint that it "
            "came from, with its other parts",
        )
    return ()
