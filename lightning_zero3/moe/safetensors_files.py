# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors, looked through before anything is believed, and then read slice by slice.

Every size in a header is checked against the file, and every name against all others, before the first byte of a weight
is read. What can't be trusted is refused by the name of its file.

Source of the format: https://huggingface.co/docs/safetensors, "Format"; the limit on headers is that library's own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.config import SetupError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Bytes. The second is ten times what the largest public configs take, the third safetensors' limit for headers.
_LARGEST_CONFIG = 10_000_000
_LARGEST_HEADER = 100_000_000
# Pages of a mapped file count as this process's until it is closed.
_MAPPED_AT_MOST = 64 << 20
# Bits of one element, and what torch calls it where weights may have it.
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32}
_BITS |= {"U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool}


class BrokenWeightsError(SetupError):
    """A file of weights can't be read as what it says it is; the message names the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        file: The file's name.
        dtype: As safetensors calls it.
        shape: Its shape.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


class WeightFiles:
    """The safetensors of one folder, single or indexed, and what has been read of them.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    Raises:
        BrokenWeightsError: Files are missing, malformed, or contradict themselves or each other.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = _config(self.folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes_read = 0
        self._sizes: dict[str, int] = {}
        self._opened: tuple[str, Any] | None = None
        self._mapped = 0
        self._look_through()

    def _look_through(self) -> None:
        named = self._named_by_index()
        for file in sorted(set(named.values())) if named is not None else [SINGLE]:
            path = self.folder / file
            if not path.is_file():
                raise BrokenWeightsError(f"{self.folder / INDEX} names {file}, which isn't there or is no file.")
            self._sizes[file] = path.stat().st_size
            for name, tensor in read_header(path).items():
                if name in self.tensors:
                    raise BrokenWeightsError(f"{name} is in {self.tensors[name].file} and in {path}.")
                if named is not None and named.get(name) != file:
                    raise BrokenWeightsError(f"{path} holds {name}, and {self.folder / INDEX} doesn't say so.")
                self.tensors[name] = tensor
        absent = [] if named is None else [name for name in named if name not in self.tensors]
        if absent:
            raise BrokenWeightsError(
                f"{self.folder / INDEX} says that {named[absent[0]]} holds {absent[0]}"  # type: ignore[index]
                f"{f' (and {len(absent) - 1} more)' if len(absent) > 1 else ''}, and it doesn't."
            )

    def _named_by_index(self) -> dict[str, str] | None:
        if not self.folder.is_dir():
            raise BrokenWeightsError(f"{self.folder} is no folder.")
        if (self.folder / SINGLE).is_file():
            return None
        path = self.folder / INDEX
        if not path.is_file():
            raise BrokenWeightsError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}. Other formats aren't read: load them with "
                "Transformers' from_pretrained, and save them with save_pretrained."
            )
        named = _json(path, _LARGEST_HEADER).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise BrokenWeightsError(f"{path} has no weight_map from names to files.")
        for file in set(named.values()):
            # A link in the folder may lead out of it, as those of the Hub's cache do; a name may not.
            if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
                raise BrokenWeightsError(f"{path} names {file!r}, which isn't a file's name in its own folder.")
        return named

    def fingerprint(self) -> tuple[Any, ...]:
        """What ranks that see the same files have in common."""
        described = repr(sorted((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()))
        return tuple(self._sizes.items()), hashlib.sha256(described.encode()).hexdigest()

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """One box of a tensor, and its bytes added to ``bytes_read``.

        Args:
            name: The tensor's name.
            start: Where the box begins.
            size: Its size.

        Returns:
            A view of the mapped file, to be used at once: later reads may close the file.

        Raises:
            BrokenWeightsError: The file is no longer the one that was looked through.
        """
        stored = self.tensors[name]
        found = self._file(stored.file).get_slice(name)
        if tuple(found.get_shape()) != stored.shape or found.get_dtype() != stored.dtype:
            raise BrokenWeightsError(f"{self.folder / stored.file} has changed while it was being loaded.")
        box = tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))
        values: torch.Tensor = found[box] if box else found[...]
        read = values.numel() * values.element_size()
        self.bytes_read += read
        self._mapped += read
        return values

    def close(self) -> None:
        """Let go of the open file."""
        self._opened = None

    def _file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._opened is None or self._opened[0] != file or self._mapped > _MAPPED_AT_MOST:
            self.close()
            path = self.folder / file
            if not path.is_file() or path.stat().st_size != self._sizes[file]:
                raise BrokenWeightsError(f"{path} has changed while it was being loaded.")
            try:
                self._opened, self._mapped = (file, safe_open(path, "pt")), 0
            except (SafetensorError, OSError) as error:
                raise BrokenWeightsError(f"{path}: {error}") from error
        return self._opened[1]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors, with every size in the header checked against the file.

    Args:
        path: The file.

    Raises:
        BrokenWeightsError: It is no such file, or it contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise BrokenWeightsError(f"{path} has {size} bytes, and its header can't be {length} bytes long.")
        text = file.read(length)
    if text[:1] != b"{":
        raise BrokenWeightsError(f"{path} doesn't begin with a header.")
    entries = _parsed(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BrokenWeightsError(f"{path} has metadata that isn't text.")
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        tensors[name], begin, end = _entry(path, name, entry)
        ranges.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached:
            raise BrokenWeightsError(f"{path}: {name} begins at byte {begin}, and what is before it ends at {reached}.")
        reached = end
    if reached != size - 8 - length:
        raise BrokenWeightsError(f"{path}: its tensors take {reached} bytes, and it has {size - 8 - length} for them.")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    if not name.isprintable():
        raise BrokenWeightsError(f"{path}: {name!r} is no name.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BrokenWeightsError(f"{path}: {name} isn't described by dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise BrokenWeightsError(f"{path}: {name} has the dtype {dtype!r}.")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise BrokenWeightsError(f"{path}: {name} has the shape {shape!r} and the offsets {offsets!r}.")
    tensor = StoredTensor(path.name, dtype, tuple(shape))
    if math.prod(shape) * _BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        raise BrokenWeightsError(
            f"{path}: {name} has {tensor.nbytes} bytes by its shape {shape} and dtype {dtype}, and "
            f"{offsets[1] - offsets[0]} by its offsets."
        )
    return tensor, offsets[0], offsets[1]


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return _json(path, _LARGEST_CONFIG) if path.is_file() else {}


def _json(path: Path, limit: int) -> dict[str, Any]:
    if (size := path.stat().st_size) > limit:
        raise BrokenWeightsError(f"{path} has {size:,} bytes; at most {limit:,} are read.")
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise BrokenWeightsError(f"{path} has {twice!r} twice.")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except BrokenWeightsError:
        raise
    except (ValueError, RecursionError) as error:
        raise BrokenWeightsError(f"{path} holds no readable JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BrokenWeightsError(f"{path} holds no JSON object.")
    return parsed
