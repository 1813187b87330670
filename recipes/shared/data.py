# SPDX-License-Identifier: Apache-2.0
"""Training text for the recipes: files, Hugging Face data sets or Python's own source, read into one row of tokens.

Every source is read piece by piece and in a fixed order, so that memory holds tokens and not documents, reading stops
as soon as enough tokens are there, and all ranks see the same data.
"""

import glob
import hashlib
import importlib
import json
import os
import platform
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

ENDINGS = (".txt", ".text", ".md", ".rst", ".py", ".jsonl", ".json", ".parquet")
PIECE_BYTES = 1 << 16
BATCH_PIECES = 64
_ALLOWED = (
    "Allowed are 'stdlib', a text, .jsonl, .json or .parquet file, a directory or a glob pattern of such files, and "
    "'hf:NAME', 'hf:NAME:SPLIT' or 'hf:NAME:CONFIG:SPLIT'"
)
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Tokens = npt.NDArray[np.integer[Any]]


class _Piece(NamedTuple):
    """UTF-8 bytes of a document or of a part of it, and whether a new document begins with them."""

    text: bytes
    opens: bool


@dataclass(frozen=True, eq=False)
class TokenStream:
    """All documents of a source in one row.

    Args:
        tokens: token ids, shape [number of tokens], uint8 for bytes and uint32 for a tokenizer's ids.
        vocab_size: number of ids a model needs; an id that isn't below it raises ValueError.
        description: one line for people, such as "Python standard library 3.11.7, 612 files, 8,388,608 bytes".
    """

    tokens: Tokens
    vocab_size: int
    description: str

    def __post_init__(self) -> None:
        # An embedding lookup out of range ends a GPU run with an error that names neither the id nor the tokenizer.
        if self.tokens.size and (largest := int(self.tokens.max())) >= self.vocab_size:
            seen = f"{self.description}: token id {largest} is beyond the vocabulary of {self.vocab_size}"
            raise ValueError(f"{seen}; use a tokenizer whose ids have no gaps")

    def fingerprint(self) -> str:
        """The same for the same tokens only: other text of the same size has the same description."""
        return hashlib.blake2b(np.ascontiguousarray(self.tokens).view(np.uint8).data, digest_size=8).hexdigest()


def load_tokens(
    data: str, *, tokenizer: str | None, text_field: str = "text", max_tokens: int | None = None
) -> TokenStream:
    """Read ``data`` into one row of tokens; two calls give identical arrays.

    Args:
        data: "stdlib" for the Python standard library's source; a text, ``.jsonl``/``.json`` (an object per line) or
            ``.parquet`` file; a directory, whose files with one of ``ENDINGS`` are read recursively in sorted order,
            hidden ones left out; a glob pattern; ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT`` for a
            Hugging Face data set (default split: train). A named file of another ending is read as text.
        tokenizer: directory or hub name for ``transformers.AutoTokenizer``; None takes the UTF-8 bytes as tokens.
        text_field: JSON field, Parquet column or data set column that holds a document's text. Null is skipped.
        max_tokens: number of tokens after which reading stops; None reads everything.

    Returns:
        The documents, empty ones left out, separated by one byte 0 (vocabulary of 256) or by the tokenizer's
        end-of-sequence token (vocabulary of ``len(tokenizer)``).

    Raises:
        FileNotFoundError: nothing readable is at ``data``.
        ValueError: the data hold no text, a line isn't a JSON object, ``text_field`` is missing or isn't text, the
            tokenizer can't be loaded or has no end-of-sequence token, or ``max_tokens`` isn't positive.
        ImportError: a package that this source needs isn't installed.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1, or None to read everything")
    pieces = (piece for piece in _pieces(data, text_field) if piece.text)
    encoded: Iterable[tuple[Tokens, bool]] = ((np.frombuffer(text, np.uint8), opens) for text, opens in pieces)
    separator, vocab_size, unit = np.zeros(1, np.uint8), 256, "bytes"
    if tokenizer is not None:
        loaded = _load_tokenizer(tokenizer)
        separator, vocab_size, unit = np.array([loaded.eos_token_id], np.uint32), len(loaded), f"tokens of {tokenizer}"
        encoded = _tokenize(pieces, loaded)
    tokens, documents = _join(encoded, separator, max_tokens)
    if not tokens.size:
        raise ValueError(f"{data!r} holds no text: every document in it is empty. {_ALLOWED}.")
    stdlib = data == "stdlib"
    name = f"Python standard library {platform.python_version()}" if stdlib else data
    counted = f"{documents:,} {'file' if stdlib else 'document'}{'' if documents == 1 else 's'}"
    return TokenStream(tokens, vocab_size, f"{name}, {counted}, {tokens.size:,} {unit}")


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Consecutive, non-overlapping windows of a stream; what is left at its end and fills no window is dropped.

    An item holds ``input_ids`` and ``labels``, int64 of shape [sequence_length] with equal values: Hugging Face causal
    models shift labels themselves. Windows shorter than 2 tokens, or a stream shorter than one, raise ValueError.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length is {sequence_length}; predicting a next token takes at least 2")
        if stream.tokens.size < sequence_length:
            seen = f"{stream.description}: {stream.tokens.size} tokens, fewer than one window of {sequence_length}"
            raise ValueError(f"{seen}; read more data or choose a shorter sequence_length")
        self.stream = stream
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return int(self.stream.tokens.size) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} isn't in 0 to {len(self) - 1}")
        start = index * self.sequence_length
        input_ids = torch.from_numpy(self.stream.tokens[start : start + self.sequence_length].astype(np.int64))
        # A copy, so that masking labels in place never changes the input.
        return {"input_ids": input_ids, "labels": input_ids.clone()}


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best model that ignores context.

    Takes integers of shape [number of tokens], none negative; raises ValueError for an empty array. Half of these
    tokens are 0, a quarter 1 and a quarter 2, which makes 1.5 bits, or 1.5 ln 2 nats:

    >>> round(unigram_entropy(np.array([0, 0, 1, 2])), 4)
    1.0397
    """
    if not tokens.size:
        raise ValueError("the entropy of no tokens is undefined; pass at least one")
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / tokens.size
    return float(np.sum(shares * np.log(1 / shares)))


def _pieces(data: str, text_field: str) -> Iterator[_Piece]:
    """The documents of ``data``, read lazily; raises FileNotFoundError or ValueError where it names nothing."""
    if data.startswith("hf:"):
        return _dataset_pieces(data, text_field)
    if data == "stdlib":
        files = _files_below(Path(sysconfig.get_path("stdlib")), (".py",), _STDLIB_SKIPPED)
        # In a fixed random order, so that a cut-off sample isn't made of the first few packages of the alphabet.
        random.Random(0).shuffle(files)
    else:
        files = _named_files(data)
    readers = {".jsonl": _json_pieces, ".json": _json_pieces, ".parquet": _parquet_pieces}
    return (piece for path in files for piece in readers.get(path.suffix.lower(), _text_pieces)(path, text_field))


def _named_files(data: str) -> list[Path]:
    """Files that a path or glob pattern names, sorted; raises FileNotFoundError for none."""
    path = Path(data).expanduser()
    # An empty path would mean the working directory, which nobody who forgot a value wants to train on.
    if data and path.is_dir():
        files = _files_below(path, ENDINGS, frozenset())
    elif path.is_file():  # before patterns, since a name may hold brackets
        files = [path]
    else:
        files = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
    if not files:
        seen = f"{data!r} is no file, no pattern that matches one and no directory with one that ends in"
        raise FileNotFoundError(f"{seen} {', '.join(ENDINGS)}. {_ALLOWED}.")
    return files


def _files_below(root: Path, endings: tuple[str, ...], skipped: frozenset[str]) -> list[Path]:
    """Files under ``root`` by ending, in the order of their relative paths; hidden and ``skipped`` names left out."""
    found = []
    for folder, folders, names in os.walk(root):
        # Changed in place: os.walk then never enters them (site-packages alone may hold more files than all the rest).
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.lower().endswith(endings) and not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _text_pieces(path: Path, _text_field: str) -> Iterator[_Piece]:
    """A text file as one document, in pieces of about ``PIECE_BYTES``."""
    opens, rest = True, b""
    with path.open("rb") as file:
        while len(block := file.read(PIECE_BYTES)) == PIECE_BYTES:
            text = rest + block
            # A tokenizer should meet no torn word: cut after a line, else after a space, else there is no good place.
            cut = text.rfind(b"\n") + 1 or text.rfind(b" ") + 1 or len(text)
            yield _Piece(text[:cut], opens)
            opens, rest = False, text[cut:]
    yield _Piece(rest + block, opens)


def _json_pieces(path: Path, text_field: str) -> Iterator[_Piece]:
    """The documents of a JSON-lines file; raises ValueError with file and line for a line that holds none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}")
            except ValueError as error:
                raise ValueError(f"{place}: no JSON object ({error}): {line[:60]!r}; write one per line") from error
            yield _document(row, text_field, place)


def _parquet_pieces(path: Path, text_field: str) -> Iterator[_Piece]:
    """The documents of a Parquet file, batch by batch; raises ValueError for a broken file or a missing column."""
    parquet = _optional_package("pyarrow.parquet", "a .parquet file")
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:
        raise ValueError(f"{path} is no readable Parquet file: {error}") from error
    with file:
        # Without the column, a row of all others lets _document name them.
        columns = [text_field] if text_field in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            yield from (_document(row, text_field, str(path)) for row in batch.to_pylist())


def _dataset_pieces(data: str, text_field: str) -> Iterator[_Piece]:
    """The documents of a Hugging Face data set, streamed; raises ValueError where ``data`` isn't of a known form."""
    name, *rest = data.removeprefix("hf:").split(":")
    if len(rest) > 2 or not all((name, *rest)):
        raise ValueError(f"{data!r} isn't understood. {_ALLOWED}.")
    config, split = (None, *(rest or ["train"]))[-2:]
    datasets = _optional_package("datasets", "an hf: data set")
    rows = datasets.load_dataset(name, config, split=split, streaming=True)
    return (_document(row, text_field, data) for row in rows)


def _document(row: dict[str, Any], text_field: str, place: str) -> _Piece:
    """A row's text in one piece (empty for None); raises ValueError where the field is missing or isn't text."""
    if text_field not in row:
        raise ValueError(f"{place}: no field {text_field!r}, only {list(row)}; set text_field to one of them")
    if not isinstance(text := row[text_field], str | None):
        raise ValueError(f"{place}: field {text_field!r} isn't text but {type(text).__name__}; choose a text field")
    # JSON may escape half of a surrogate pair, which UTF-8 can't hold.
    return _Piece((text or "").encode("utf-8", errors="replace"), opens=True)


def _load_tokenizer(name: str) -> Any:
    """A transformers tokenizer; raises ValueError if it can't be loaded or has no end-of-sequence token."""
    transformers = _optional_package("transformers", "a tokenizer")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        advice = "give a directory that save_pretrained wrote or a hub name, or no tokenizer to train on bytes"
        raise ValueError(f"tokenizer {name!r} can't be loaded; {advice}: {error}") from error
    if loaded.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no eos_token to separate documents with; save it with one")
    return loaded


def _tokenize(pieces: Iterator[_Piece], tokenizer: Any) -> Iterator[tuple[Tokens, bool]]:
    """Token ids (uint32 [number of tokens]) of each piece, and whether it opens a document."""
    # In batches, which the tokenizer spreads over the processor's cores.
    while batch := list(islice(pieces, BATCH_PIECES)):
        texts = [piece.text.decode("utf-8", errors="replace") for piece in batch]
        # verbose=False: a document longer than the model's context is no mistake here, windows are cut afterwards.
        rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        yield from ((np.array(row, np.uint32), piece.opens) for piece, row in zip(batch, rows, strict=True))


def _join(encoded: Iterable[tuple[Tokens, bool]], separator: Tokens, max_tokens: int | None) -> tuple[Tokens, int]:
    """The first ``max_tokens`` tokens, documents divided by ``separator``, and how many documents they come from."""
    chunks, total, documents = [separator[:0]], 0, 0
    for ids, opens in encoded:
        new = [separator, ids] if opens and documents else [ids]
        chunks += new
        total += sum(chunk.size for chunk in new)
        documents += opens
        if max_tokens is not None and total >= max_tokens:
            break
    return np.concatenate(chunks)[:max_tokens], documents


def _optional_package(name: str, purpose: str) -> ModuleType:
    """Import a package that only some sources need; raises ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package missing inside an installed one is another fault, which this advice would hide.
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(f"{purpose} needs {error.name}: pip install lightning_zero3[recipes]") from error
