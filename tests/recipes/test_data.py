# SPDX-License-Identifier: Apache-2.0
"""Reading training text: every kind of source, the cut into windows, and the errors a user may meet."""

import doctest
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import shared.data
from shared.data import PackedTokens, TokenStream, load_tokens, unigram_entropy


def _read(data: object, **options: Any) -> bytes:
    """The bytes that ``load_tokens`` gives without a tokenizer."""
    stream = load_tokens(str(data), tokenizer=None, **options)
    assert stream.tokens.dtype == np.uint8
    assert stream.tokens.ndim == 1
    assert stream.vocab_size == 256
    return stream.tokens.tobytes()


def _write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _write_parquet(path: Path, columns: dict[str, list[Any]], rows_per_group: int = 2) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A small standard library in place of Python's, as relative path -> content of the files that count."""
    root = tmp_path / "lib"
    kept = {f"module{number}.py": f"number = {number}\n".encode() for number in range(20)} | {"json/a.py": b"pass\n"}
    left_out = (
        "site-packages/torch.py",
        "dist-packages/apt.py",
        "test/test_os.py",
        "json/tests/test_json.py",
        "idlelib/idle_test/t.py",
        "json/__pycache__/a.py",
        "module0.pyc",
        "LICENSE.txt",
    )
    for name, content in (kept | dict.fromkeys(left_out, b"UNWANTED")).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr("shared.data.sysconfig.get_path", lambda name: str(root / {"stdlib": ""}[name]))
    return kept


class TestStandardLibrary:
    def test_reads_every_source_file_once_and_nothing_else(self, stdlib: dict[str, bytes]) -> None:
        assert sorted(_read("stdlib").split(b"\0")) == sorted(stdlib.values())

    def test_order_of_files_is_mixed(self, stdlib: dict[str, bytes]) -> None:
        assert _read("stdlib") != b"\0".join(stdlib[name] for name in sorted(stdlib))

    def test_reads_no_file_past_max_tokens(self, stdlib: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        opened = []
        read = shared.data._text_pieces

        def spy(path: Path, text_field: str) -> Iterator[Any]:
            opened.append(path)
            return read(path, text_field)

        monkeypatch.setattr("shared.data._text_pieces", spy)
        assert len(_read("stdlib", max_tokens=20)) == 20
        assert len(opened) == 2

    def test_real_one_is_python_and_the_same_each_time(self) -> None:
        first = load_tokens("stdlib", tokenizer=None, max_tokens=500_000)
        second = load_tokens("stdlib", tokenizer=None, max_tokens=500_000)
        assert first.tokens.size == 500_000
        assert np.array_equal(first.tokens, second.tokens)
        assert first.description == second.description
        assert first.description.startswith("Python standard library ")
        assert first.description.endswith(" files, 500,000 bytes")
        text = first.tokens.tobytes()
        assert text.count(b"import ") > 50
        assert 2 < unigram_entropy(first.tokens) < math.log(256)


class TestFiles:
    @pytest.mark.parametrize("name", ["a.txt", "a.unknown", "a", "a[1].txt"])
    def test_named_text_file_gives_its_bytes(self, tmp_path: Path, name: str) -> None:
        content = "Grüße\r\n".encode() + bytes(range(256))
        (tmp_path / name).write_bytes(content)
        assert _read(tmp_path / name) == content

    @pytest.mark.parametrize("content", [b"x", b"words and\nlines ", b"words only ", b"\n"], ids=repr)
    @pytest.mark.parametrize("extra", [-1, 0, 1])
    def test_text_longer_than_a_piece_is_whole(self, tmp_path: Path, content: bytes, extra: int) -> None:
        content = (content * shared.data.PIECE_BYTES)[: 3 * shared.data.PIECE_BYTES + extra]
        (tmp_path / "long.txt").write_bytes(content)
        assert _read(tmp_path / "long.txt") == content

    def test_pieces_end_with_a_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.data.PIECE_BYTES", 8)
        (tmp_path / "a.txt").write_bytes(b"one two\nthree four\nfive six")
        pieces = list(shared.data._text_pieces(tmp_path / "a.txt", "text"))
        assert pieces == [(b"one two\n", True), (b"three ", False), (b"four\n", False), (b"five six", False)]

    @pytest.mark.parametrize("ending", ["jsonl", "json", "JSONL"])
    def test_json_lines(self, tmp_path: Path, ending: str) -> None:
        path = _write_lines(
            tmp_path / f"a.{ending}", [{"text": "one"}, {"text": ""}, {"text": None}, {"text": "zwölf"}]
        )
        path.write_text("\n" + path.read_text(encoding="utf-8") + "  \n", encoding="utf-8")
        assert _read(path) == "one\0zwölf".encode()
        assert load_tokens(str(path), tokenizer=None).description == f"{path}, 2 documents, 10 bytes"

    def test_json_half_surrogate_does_not_stop_the_run(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n', encoding="utf-8")
        assert _read(tmp_path / "a.jsonl") == b"a?b"

    def test_parquet_over_row_groups(self, tmp_path: Path) -> None:
        texts = ["eins", "zwei", None, "drei", "vier", "fünf"]
        path = _write_parquet(tmp_path / "a.parquet", {"id": list(range(6)), "text": texts})
        assert _read(path) == "\0".join(filter(None, texts)).encode()

    def test_text_field_names_field_and_column(self, tmp_path: Path) -> None:
        _write_lines(tmp_path / "a.jsonl", [{"body": "lines", "text": 1}])
        _write_parquet(tmp_path / "b.parquet", {"body": ["table"], "text": [1]})
        assert _read(tmp_path, text_field="body") == b"lines\0table"

    def test_directory_in_sorted_order_without_unknown_and_hidden_files(self, tmp_path: Path) -> None:
        (tmp_path / "z" / "deep").mkdir(parents=True)
        (tmp_path / ".cache").mkdir()
        _write_parquet(tmp_path / "c.parquet", {"text": ["3"]})
        (tmp_path / "z" / "deep" / "d.txt").write_text("4")
        _write_lines(tmp_path / "b.jsonl", [{"text": "2"}])
        (tmp_path / "a.md").write_text("1")
        for unwanted in ("image.png", "noending", ".hidden.txt", ".cache/x.txt"):
            (tmp_path / unwanted).write_text("UNWANTED")
        assert _read(tmp_path) == b"1\0002\0003\0004"

    def test_glob_pattern(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        for name in ("b.c", "a.c", "sub/c.c", "a.h"):
            (tmp_path / name).write_text(name)
        assert _read(tmp_path / "*.c") == b"a.c\0b.c"
        assert _read(tmp_path / "**" / "*.c") == b"a.c\0b.c\0sub/c.c"

    @pytest.mark.parametrize(
        ("max_tokens", "expected"), [(1, b"a"), (3, b"abc"), (4, b"abc\0"), (5, b"abc\0d"), (99, b"abc\0def")]
    )
    def test_max_tokens_counts_separators(self, tmp_path: Path, max_tokens: int, expected: bytes) -> None:
        path = _write_lines(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "def"}])
        assert _read(path, max_tokens=max_tokens) == expected

    def test_nothing_after_max_tokens_is_parsed(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "abc"}\nbroken\n')
        assert _read(tmp_path / "a.jsonl", max_tokens=3) == b"abc"


class TestErrors:
    @pytest.mark.parametrize("name", ["absent.txt", "*.txt", "", "empty"])
    def test_nothing_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").mkdir()
        (tmp_path / "a.md").write_text("for an empty name, which must not mean the working directory")
        (tmp_path / "empty" / "image.png").write_text("x")
        with pytest.raises(FileNotFoundError) as caught:
            load_tokens(name, tokenizer=None)
        assert repr(name) in str(caught.value)
        assert all(word in str(caught.value) for word in ("stdlib", ".parquet", ".md", "hf:NAME"))

    @pytest.mark.parametrize("content", [b"", b'{"text": ""}\n'], ids=["no line", "empty text"])
    def test_no_text(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.jsonl' holds no text"):
            load_tokens(str(tmp_path / "a.jsonl"), tokenizer=None)

    @pytest.mark.parametrize("line", ["not json", '["text"]', '"text"', '{"text": "a"', "\xff"])
    def test_line_without_a_json_object(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n", encoding="latin-1")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3: no JSON object .*one per line"):
            load_tokens(str(tmp_path / "a.jsonl"), tokenizer=None)

    def test_missing_json_field(self, tmp_path: Path) -> None:
        path = _write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"body": "b", "id": 1}])
        with pytest.raises(ValueError, match=r"line 2: no field 'text', only \['body', 'id'\]; set text_field"):
            load_tokens(str(path), tokenizer=None)

    def test_missing_parquet_column(self, tmp_path: Path) -> None:
        path = _write_parquet(tmp_path / "a.parquet", {"body": ["b"], "id": [1]})
        with pytest.raises(ValueError, match=r"a\.parquet: no field 'text', only \['body', 'id'\]; set text_field"):
            load_tokens(str(path), tokenizer=None)

    def test_field_that_holds_no_text(self, tmp_path: Path) -> None:
        json_path = _write_lines(tmp_path / "a.jsonl", [{"text": 7}])
        with pytest.raises(ValueError, match=r"line 1: field 'text' isn't text but int"):
            load_tokens(str(json_path), tokenizer=None)
        parquet_path = _write_parquet(tmp_path / "a.parquet", {"text": [7]})
        with pytest.raises(ValueError, match=r"a\.parquet: field 'text' isn't text but int"):
            load_tokens(str(parquet_path), tokenizer=None)

    def test_broken_parquet_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"this is not a table")
        with pytest.raises(ValueError, match=r"a\.parquet is no readable Parquet file"):
            load_tokens(str(tmp_path / "a.parquet"), tokenizer=None)

    @pytest.mark.parametrize("max_tokens", [0, -1])
    def test_max_tokens_below_one(self, max_tokens: int) -> None:
        with pytest.raises(ValueError, match=f"max_tokens is {max_tokens}; it must be at least 1"):
            load_tokens("stdlib", tokenizer=None, max_tokens=max_tokens)

    @pytest.mark.parametrize(
        ("data", "package"), [("hf:name", "datasets"), ("a.parquet", "pyarrow.parquet"), ("a.txt", "transformers")]
    )
    def test_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, package: str) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("a.parquet", "a.txt"):
            (tmp_path / name).write_text("x")
        monkeypatch.setitem(sys.modules, package, None)
        tokenizer = "any" if package == "transformers" else None
        with pytest.raises(ImportError, match=rf"needs {package}: pip install lightning_zero3\[recipes\]"):
            load_tokens(data, tokenizer=tokenizer)

    def test_package_missing_inside_another_is_reported_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "datasets.py").write_text("import absent_dependency\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "datasets", raising=False)
        with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
            load_tokens("hf:name", tokenizer=None)


class TestDataSets:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            ("hf:owner/name", ("owner/name", None, "train")),
            ("hf:owner/name:test", ("owner/name", None, "test")),
            ("hf:/some/folder:train", ("/some/folder", None, "train")),
            ("hf:owner/name:english:test", ("owner/name", "english", "test")),
            ("hf:a:b:c:d", None),
            ("hf:", None),
            ("hf:name:", None),
        ],
    )
    def test_parts_of_the_name(
        self, monkeypatch: pytest.MonkeyPatch, data: str, expected: tuple[str, str | None, str] | None
    ) -> None:
        asked = []

        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, object]]:
            asked.append((name, config, split))
            assert streaming
            return [{"text": "one"}, {"text": "two"}]

        package = ModuleType("datasets")
        package.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", package)
        if expected is None:
            with pytest.raises(ValueError, match=r"isn't understood.*hf:NAME:CONFIG:SPLIT"):
                load_tokens(data, tokenizer=None)
        else:
            assert _read(data) == b"one\0two"
            assert asked == [expected]
            with pytest.raises(ValueError, match=r"no field 'body', only \['text'\]"):
                load_tokens(data, tokenizer=None, text_field="body")

    def test_local_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("datasets")
        _write_lines(tmp_path / "train.jsonl", [{"text": "one"}, {"text": "two"}, {"text": "three"}])
        _write_lines(tmp_path / "test.jsonl", [{"text": "four"}])
        assert _read(f"hf:{tmp_path}") == b"one\0two\0three"
        assert _read(f"hf:{tmp_path}:test") == b"four"
        assert _read(f"hf:{tmp_path}:default:train", max_tokens=6) == b"one\0tw"


class TestPackedTokens:
    @pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
    def test_windows_follow_each_other_and_the_rest_is_dropped(self, dtype: type) -> None:
        windows = PackedTokens(TokenStream(np.arange(11, dtype=dtype), 256, "numbers"), 4)
        assert len(windows) == 2
        assert [windows[index]["input_ids"].tolist() for index in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        for window in (windows[0], windows[1]):
            assert window.keys() == {"input_ids", "labels"}
            assert window["input_ids"].dtype == window["labels"].dtype == torch.int64
            assert torch.equal(window["input_ids"], window["labels"])

    def test_masking_labels_leaves_inputs_and_stream(self) -> None:
        windows = PackedTokens(TokenStream(np.arange(4, dtype=np.uint8), 256, "numbers"), 4)
        window = windows[0]
        window["labels"].fill_(-100)
        assert window["input_ids"].tolist() == windows[0]["labels"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("index", [-1, 2])
    def test_index_outside(self, index: int) -> None:
        with pytest.raises(IndexError, match=f"window {index} "):
            PackedTokens(TokenStream(np.arange(11, dtype=np.uint8), 256, "numbers"), 4)[index]

    def test_works_in_a_data_loader(self) -> None:
        windows = PackedTokens(TokenStream(np.arange(8, dtype=np.uint8), 256, "numbers"), 4)
        (batch,) = torch.utils.data.DataLoader(windows, batch_size=2)
        assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_exactly_one_window_fits_and_one_token_less_does_not(self) -> None:
        assert len(PackedTokens(TokenStream(np.zeros(4, np.uint8), 256, "zeros"), 4)) == 1
        with pytest.raises(ValueError, match="zeros: 3 tokens, fewer than one window of 4"):
            PackedTokens(TokenStream(np.zeros(3, np.uint8), 256, "zeros"), 4)

    @pytest.mark.parametrize("length", [-1, 0, 1])
    def test_length_without_a_next_token(self, length: int) -> None:
        with pytest.raises(ValueError, match=f"sequence_length is {length}; "):
            PackedTokens(TokenStream(np.zeros(4, np.uint8), 256, "zeros"), length)


class TestUnigramEntropy:
    @pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
    def test_even_shares_give_the_logarithm_of_their_number(self, dtype: type) -> None:
        assert unigram_entropy(np.array([7, 9, 200, 7, 9, 200], dtype)) == pytest.approx(math.log(3))

    def test_uneven_shares(self) -> None:
        expected = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
        assert unigram_entropy(np.array([3, 3, 0, 3], np.uint8)) == pytest.approx(expected)

    def test_one_token_is_certain(self) -> None:
        assert unigram_entropy(np.array([5], np.uint8)) == 0

    def test_no_tokens(self) -> None:
        with pytest.raises(ValueError, match="entropy of no tokens"):
            unigram_entropy(np.array([], np.uint8))

    def test_example_in_the_docstring(self) -> None:
        results = doctest.testmod(shared.data)
        assert results.attempted >= 1
        assert results.failed == 0
