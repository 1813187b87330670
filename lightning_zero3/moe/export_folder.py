# SPDX-License-Identifier: Apache-2.0
"""Writing a Hugging Face folder: shards, index, config and tokenizer, in a folder that gets its name when it is whole.

While it is written it is ``.NAME.unfinished`` beside its place. One that is there already is moved away by a rename,
and deleted when the new one has taken its place.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.config import SetupError
from lightning_zero3.moe import adapter_export
from lightning_zero3.moe.boxes import Ints
from lightning_zero3.moe.safetensors_files import INDEX, SINGLE

# What tokenizers and processors are made of, beside the weights.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
GENERATION = "generation_config.json"
CONFIG = "config.json"


class NotExportedError(SetupError):
    """An export couldn't be written; what was at its path is as it was."""


def require_free(
    path: Path, *, overwrite: bool, alone: bool = False, made_from: Iterable[str | Path | None] = ()
) -> None:
    """Refuse to write over something.

    Args:
        path: Where an export shall be.
        overwrite: Whether an earlier export there is replaced.
        alone: Whether an adapter alone is written. It replaces no model, and a model replaces no adapter.
        made_from: Folders that are read, which aren't replaced.

    Raises:
        NotExportedError: There is something else, or an earlier one that isn't to be replaced.
    """
    if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
        return
    if any(each is not None and path.resolve() == Path(each).resolve() for each in made_from):
        raise NotExportedError(f"{path} is read for this export, and would be replaced by it: give another path.")
    ours, other = (adapter_export.CONFIG, CONFIG) if alone else (CONFIG, adapter_export.CONFIG)
    known = (path / ours).is_file() and not (path / other).is_file()
    if not (path.is_dir() and not path.is_symlink() and known):
        kind = "adapter's folder" if alone else "Hugging Face folder of a model"
        raise NotExportedError(f"{path} is there, and is no {kind}: give another path, or remove it.")
    if not overwrite:
        raise NotExportedError(f"{path} is there and isn't empty: give another path, or overwrite.")


class ExportFolder:
    """A Hugging Face folder that is being written; on one rank.

    At most one shard is kept in memory: one is written when its last tensor has come.

    Args:
        path: Where it shall be.
        tensors: Name → shape and dtype of everything that will be written, in the order in which it will come.
        max_shard_size: The most bytes of a file, such as ``"5GB"``. A single larger tensor has a file of its own.
        parameters: Number of the model's parameters, for the index.
        outline: Of a model whose adapter alone is written, in PEFT's format: one file, whatever its size.

    Raises:
        NotExportedError: The folder can't be made.
        SetupError: ``max_shard_size`` is no size.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[Ints, torch.dtype]],
        max_shard_size: int | str = "5GB",
        *,
        parameters: int,
        outline: adapter_export.Outline | None = None,
    ) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        described = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
        try:
            split = split_torch_state_dict_into_shards(described, max_shard_size=max_shard_size)
            if outline is not None:
                whole = sys.maxsize
                pattern = f"{adapter_export.FILE}{{suffix}}.safetensors"
                split = split_torch_state_dict_into_shards(described, filename_pattern=pattern, max_shard_size=whole)
        except ValueError as error:
            raise SetupError(f"max_shard_size={max_shard_size!r}: a number of bytes, or a size as '5GB'.") from error
        self.path, self._tensors, self._parameters, self._outline = path, dict(tensors), parameters, outline
        self.files = dict(split.filename_to_tensors)
        self._file_of = {name: file for file, names in self.files.items() for name in names}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self.bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
        self.folder = path.with_name(f".{path.name}.unfinished")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise NotExportedError(f"{self.folder} can't be made: {error.strerror}.") from error

    def add(self, name: str, values: torch.Tensor) -> None:
        """Write a tensor, when its shard is complete.

        Args:
            name: Its name in the files.
            values: Its elements, in whatever precision; they are copied.
        """
        from safetensors.torch import save_file

        shape, dtype = self._tensors[name]
        file = self._file_of[name]
        waiting = self._waiting.setdefault(file, {})
        waiting[name] = values.detach().to("cpu", dtype, copy=True).reshape(shape).contiguous()
        if len(waiting) == len(self.files[file]):
            del self._waiting[file]
            save_file(waiting, self.folder / file, metadata={"format": "pt"})

    def finish(self) -> None:
        """Write the index, and give the folder its name.

        Raises:
            OSError: It can't be written.
        """
        assert not self._waiting
        if list(self.files) != [SINGLE] and self._outline is None:
            index = {
                "metadata": {
                    "total_parameters": self._parameters,
                    "total_size": self.bytes,
                },
                "weight_map": self._file_of,
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for each in (*self.folder.iterdir(), self.folder):
            _sync(each)
        previous = self.path.with_name(f".{self.path.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        if self.path.exists():
            self.path.rename(previous)
        self.folder.rename(self.path)
        _sync(self.path.parent)
        shutil.rmtree(previous, ignore_errors=True)

    def abandon(self) -> None:
        """Delete what has been written."""
        self._waiting.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_configs(self, model: Any, dtype: torch.dtype, base: Path | None, copied_from: Iterable[Path]) -> None:
        """Write config.json and generation_config.json, or adapter_config.json, and copy a tokenizer's files.

        Args:
            model: The Hugging Face model.
            dtype: The weights'.
            base: The base checkpoint, whose config is written, with this dtype.
            copied_from: Folders with a tokenizer's files and generation_config.json; the first that has one counts.
        """
        name = str(dtype).removeprefix("torch.")
        if self._outline is not None:
            self._outline.write_config(self.folder, base)
        elif base is not None:
            fields = json.loads((base / CONFIG).read_text(encoding="utf-8"))
            _rename_dtype(fields, name)
            (self.folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        else:
            config = copy.deepcopy(model.config)
            config.dtype, config.architectures = name, [architecture_of(model)]
            config.save_pretrained(self.folder)
            if model.can_generate() and getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(self.folder)
        for folder in reversed(list(copied_from)):
            for each in (*TOKENIZER_FILES, *([GENERATION] if self._outline is None else [])):
                if (folder / each).is_file():
                    shutil.copyfile(folder / each, self.folder / each)


def architecture_of(model: Any) -> str:
    """What a config calls a model's class: Transformers' own, where the object has been given a subclass of it.

    Args:
        model: A Hugging Face model.
    """
    theirs = (each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
    own = type(model)
    # A user's model with a name of its own stands beside PreTrainedModel only.
    closest = next(theirs, own)
    return (own if closest.__name__ == "PreTrainedModel" else closest).__name__


def _rename_dtype(fields: dict[str, Any], name: str) -> None:
    """A composite config says it of each of its models."""
    for key in [key for key in ("dtype", "torch_dtype") if key in fields]:
        fields[key] = name
    text = fields.get("text_config")
    if isinstance(text, dict):
        _rename_dtype(text, name)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
