# SPDX-License-Identifier: Apache-2.0
"""What an export will write: each tensor of a model, what files call it or its parts, and in which precision."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_zero3.config import SetupError
from lightning_zero3.listing import by_kind
from lightning_zero3.moe.adapter_export import ONLY, Outline, require_mergeable, require_restorable
from lightning_zero3.moe.adapters import AdapterError, is_added
from lightning_zero3.moe.boxes import Block, Ints
from lightning_zero3.moe.file_names import FileNames, FilePart
from lightning_zero3.moe.safetensors_files import DTYPES, WeightFiles
from lightning_zero3.moe.weight_names import Held, held_tensors
from lightning_zero3.moe.weight_plan import UnfitWeightsError

# What `dtype` may be.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Source:
    """A tensor of the model that is to be written.

    Args:
        names: Transformers' names of it; several if it is tied.
        shape: Its shape in Transformers' model.
        dtype: What it has in memory or in a checkpoint's files.
        is_buffer: Whether it is a buffer.
    """

    names: tuple[str, ...]
    shape: Ints
    dtype: torch.dtype
    is_buffer: bool = False


@dataclass(frozen=True)
class Output:
    """A source, and what is written of it.

    Args:
        source: The tensor.
        dtype: Its elements' in the files.
        parts: The files' tensors that are made of it.
        added: An adapter's tensors, to be merged into it first.
    """

    source: Source
    dtype: torch.dtype
    parts: tuple[FilePart, ...]
    added: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every tensor of the model that it takes."""
        return (self.source, *self.added)


@dataclass
class Contents:
    """Everything that is written.

    Args:
        outputs: The model's tensors, in order.
        carried: Names of the base checkpoint's tensors that aren't the model's, which are copied.
        tied: Transformers' names that aren't written because another of the same tensor is.
    """

    outputs: list[Output]
    carried: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Number of elements of the model's parameters, as an index has it; not of its buffers."""
        return sum(math.prod(out.source.shape) for out in self.outputs if not out.source.is_buffer)

    def tensors(self, base: WeightFiles | None) -> dict[str, tuple[Ints, torch.dtype]]:
        """Every tensor in the files: name → shape and dtype, in the order in which they are written.

        Args:
            base: The base checkpoint, if there is one.
        """
        found = {part.name: (part.shape, out.dtype) for out in self.outputs for part in out.parts}
        if base is not None:
            stored = {name: base.tensors[name] for name in self.carried}
            found.update({name: (each.shape, DTYPES[each.dtype]) for name, each in stored.items()})
        return found


def precision(name: str) -> torch.dtype:
    """What an option names.

    Args:
        name: A name in :data:`PRECISIONS`.

    Raises:
        SetupError: There is no such.
    """
    if name not in PRECISIONS:
        raise SetupError(f"dtype={name!r}: one of {', '.join(PRECISIONS)}; fp32 writes the masters.")
    return PRECISIONS[name]


def contents_of(model: Any, sources: list[Source], dtype: str, base: WeightFiles | None = None) -> Contents:
    """Name what is written as ``save_pretrained`` would, or as a base checkpoint has it.

    Args:
        model: The Hugging Face model; its class and config are asked.
        sources: Its tensors.
        dtype: A name in :data:`PRECISIONS`. Buffers, and what the model's class keeps in fp32, stay in it.
        base: The checkpoint that the model was loaded from. Its names and its layout of experts are taken, and what of
            it isn't the model's is carried over.

    Raises:
        UnfitWeightsError: The base checkpoint isn't one of this model.
        UnknownLayoutError: Transformers makes a tensor of others in a way that isn't known.
        SetupError: There is no such precision.
    """
    target = precision(dtype)
    whole = {name: source.shape for source in sources for name in source.names}
    names = FileNames(model, whole)
    ignored = tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())
    keep = _kept_in_fp32(model)
    contents = Contents([])
    parts_of, others = ({}, {}) if base is None else _in_base(names, base)
    problems: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        known = [name for name in source.names if name not in ignored]
        named = known[:1] if base is None else [name for name in known if name in parts_of][:1]
        if not named:
            problems["missing"] += known[:1]
            continue
        parts = tuple(names.saved_as(named[0]) if base is None else parts_of[named[0]])
        contents.tied += [name for name in known if name not in named]
        if base is not None:
            _check(named[0], source, parts, base, problems)
        fp32 = source.is_buffer or (keep is not None and keep.search(named[0]) is not None)
        written = source.dtype if not source.dtype.is_floating_point else torch.float32 if fp32 else target
        contents.outputs.append(Output(source, written, parts))
    if problems:
        assert base is not None
        said = by_kind(problems.items())
        raise UnfitWeightsError(
            f"{base.folder} isn't a checkpoint of this {type(model).__name__}. Tensors in it: {said}. Nothing was "
            "written. Give the folder that the model was loaded from, or leave base out."
        )
    contents.carried = sorted(others)
    return contents


def contents_with(
    outline: Outline | None,
    adapters: str,
    model: Any,
    sources: list[Source],
    dtype: str,
    base: WeightFiles | None,
    trained: Iterable[str],
) -> Contents:
    """What is written of a model that may have adapters.

    Args:
        outline: Of a model with adapters.
        adapters: What of both is written.
        model: The Hugging Face model.
        sources: Its tensors.
        dtype: The weights'.
        base: The checkpoint that it was loaded from.
        trained: Names of the tensors that are trained.

    Raises:
        SetupError: It can't be written like this.
    """
    if outline is None and adapters == ONLY:
        raise AdapterError(f'adapters="only", and {type(model).__name__} has none of PEFT\'s. Leave it out.')
    if outline is None:
        return contents_of(model, sources, dtype, base)
    if adapters == ONLY:
        return adapter_contents(outline, sources, dtype, trained)
    return merged_contents(outline, model, sources, dtype, base)


def adapter_contents(outline: Outline, sources: list[Source], dtype: str, trained: Iterable[str]) -> Contents:
    """Name what is written of a model whose adapter alone is, as PEFT's ``save_pretrained`` would.

    Args:
        outline: Of the model.
        sources: Its tensors.
        dtype: A name in :data:`PRECISIONS`.
        trained: Names of the tensors that are trained.

    Raises:
        AdapterError: The adapter needs base weights that nobody else has.
        SetupError: There is no such precision.
    """
    require_restorable(outline, trained)
    of_name = {name: source for source in sources for name in source.names}
    outputs = []
    for saved, name in outline.saved_names().items():
        shape = of_name[name].shape
        source = Source((name,), shape, of_name[name].dtype, of_name[name].is_buffer)
        outputs.append(Output(source, precision(dtype), (FilePart(saved, Block.of_all(shape), shape),)))
    return Contents(outputs)


def merged_contents(
    outline: Outline, model: Any, sources: list[Source], dtype: str, base: WeightFiles | None = None
) -> Contents:
    """:func:`contents_of` a model whose adapter is merged into its weights.

    Args:
        outline: Of the model.
        model: The Hugging Face model.
        sources: Its tensors, called by :meth:`Outline.name_merged`.
        dtype: A name in :data:`PRECISIONS`.
        base: The checkpoint that the model was loaded from.

    Raises:
        AdapterError: The adapter can't be merged.
        SetupError: As :func:`contents_of`.
    """
    require_mergeable(outline)
    added = {source.names[0]: source for source in sources if is_added(source.names[0])}
    plain = [source for source in sources if source.names[0] not in added]
    outline.require_untied(source.names for source in plain if len(source.names) > 1)
    contents = contents_of(model, plain, dtype, base)
    contents.outputs = [
        replace(output, added=tuple(added[name] for name in outline.added_to(output.source.names[0])))
        for output in contents.outputs
    ]
    return contents


def _in_base(names: FileNames, base: WeightFiles) -> tuple[dict[str, list[FilePart]], dict[str, str]]:
    if base.config.get("quantization_config"):
        raise UnfitWeightsError(
            f"{base.folder} holds quantized weights (quantization_config in config.json): what is trained can't be put "
            "back among them. Give a checkpoint in 16 or 32 bits."
        )
    odd = [name for name, tensor in base.tensors.items() if tensor.dtype not in DTYPES]
    if odd:
        raise UnfitWeightsError(
            f"{base.folder} holds {odd[0]} as {base.tensors[odd[0]].dtype}, which isn't known here."
        )
    return names.sort(list(base.tensors))


def _check(
    name: str, source: Source, parts: tuple[FilePart, ...], base: WeightFiles, problems: dict[str, list[str]]
) -> None:
    for part in parts:
        stored = base.tensors.get(part.name)
        if stored is None:
            problems["missing"].append(part.name)
        elif stored.shape != part.shape:
            problems["of another shape"].append(part.name)
    if sum(part.block.numel for part in parts) != Block.of_all(source.shape).numel:
        problems["there more than once"].append(name)


def _kept_in_fp32(model: Any) -> re.Pattern[str] | None:
    """What Transformers keeps in fp32 in a model of 16 bits (``PreTrainedModel._keep_in_fp32_modules_strict``)."""
    modules = [
        each
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for each in getattr(model, attribute, None) or ()
    ]
    return re.compile("|".join(rf"(?:(?:^|\.){each}(?:$|\.))" for each in modules)) if modules else None


def held_as_named(model: Any, merging: Outline | None) -> dict[str, tuple[torch.Tensor, Held]]:
    """A model's :func:`~lightning_zero3.moe.weight_names.held_tensors`, a trained copy by what it stands in for.

    Args:
        model: A Hugging Face model, of whatever layers.
        merging: The outline of its adapter, where that is merged.
    """
    held = held_tensors(model)
    if merging is None:
        return held
    named = {own: merging.name_merged(each.name, own) for own, (_, each) in held.items()}
    return {own: (held[own][0], replace(held[own][1], name=name)) for own, name in named.items() if name is not None}


def sources_of(tensors: Mapping[str, tuple[torch.Tensor, Held]]) -> list[Source]:
    """A model's tensors, each once.

    Args:
        tensors: Of :func:`held_as_named`. Several may be parts of one tensor of Transformers', and one tensor may have
            several names.
    """
    tied: dict[int, list[str]] = defaultdict(list)
    found: dict[str, Source] = {}
    for tensor, held in tensors.values():
        theirs = held.name
        if theirs not in tied[id(tensor)]:
            tied[id(tensor)].append(theirs)
        buffer = not isinstance(tensor, torch.nn.Parameter)
        found.setdefault(theirs, Source((theirs,), held.whole, tensor.dtype, buffer))
    names_of = {theirs: tuple(names) for names in tied.values() for theirs in names}
    taken: set[str] = set()
    sources = []
    for theirs, source in found.items():
        if theirs in taken:
            continue
        names = names_of[theirs]
        taken.update(names)
        sources.append(Source(names, source.shape, source.dtype, source.is_buffer))
    return sources
