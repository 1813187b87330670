# SPDX-License-Identifier: Apache-2.0
"""Reading training text with a tokenizer of the user's own."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from shared.data import TokenStream, load_tokens


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save a tokenizer of five words (ids 0 to 4), special tokens as given; returns its directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def save(**special: str) -> str:
        words = {"<unk>": 0, "<eos>": 1, "red": 2, "green": 3, "blue": 4}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # Many tokenizers put a special token before each text; here only documents are to be divided.
        tokenizer.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
        path = tmp_path_factory.mktemp("tokenizer")
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=4, **special
        ).save_pretrained(path)
        return str(path)

    return save


def test_documents_with_its_end_token_between(save: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("red green", "", "blue pink")))
    stream = load_tokens(str(path), tokenizer=save(eos_token="<eos>"))
    assert stream.tokens.dtype == np.uint32
    assert stream.tokens.tolist() == [2, 3, 1, 4, 0]
    assert stream.vocab_size == 5
    assert ", 2 documents, 5 tokens of " in stream.description


def test_many_batches_pieces_and_bad_bytes(
    save: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.data.PIECE_BYTES", 16)
    monkeypatch.setattr("shared.data.BATCH_PIECES", 3)
    (tmp_path / "a.txt").write_bytes(b"red green blue\n" * 40 + b"\xff red")
    (tmp_path / "b.txt").write_bytes(b"blue")
    expected = [2, 3, 4] * 40 + [0, 2, 1, 4]
    directory = save(eos_token="<eos>")
    assert load_tokens(str(tmp_path), tokenizer=directory).tokens.tolist() == expected
    assert load_tokens(str(tmp_path), tokenizer=directory, max_tokens=50).tokens.tolist() == expected[:50]


def test_long_documents_cause_no_warning_about_the_context(
    save: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a.txt").write_text("red " * 100)
    # The library's logger keeps its messages to itself unless told otherwise.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load_tokens(str(tmp_path / "a.txt"), tokenizer=save(eos_token="<eos>"))
    assert "longer than" not in caplog.text


def test_no_end_token(save: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red")
    with pytest.raises(ValueError, match="has no eos_token to separate documents"):
        load_tokens(str(tmp_path / "a.txt"), tokenizer=save())


def test_absent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red")
    with pytest.raises(ValueError, match="absent' can't be loaded; give a directory"):
        load_tokens(str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "absent"))


def test_id_beyond_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="some: token id 5 is beyond the vocabulary of 5"):
        TokenStream(np.array([1, 5], np.uint32), 5, "some")


def test_other_text_of_the_same_size_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    streams = []
    for text in ("red fox", "red dog", "red fox"):
        path.write_text(text)
        streams.append(load_tokens(str(path), tokenizer=None))
    assert len({stream.description for stream in streams}) == 1
    first, other, again = (stream.fingerprint() for stream in streams)
    assert first == again != other
