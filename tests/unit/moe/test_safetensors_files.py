# SPDX-License-Identifier: Apache-2.0
"""Broken and hostile folders are refused by the name of the file, and nothing is half-loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lightning_zero3.config import SetupError
from lightning_zero3.moe.load import BrokenWeightsError, load_pretrained
from lightning_zero3.moe.safetensors_files import INDEX, SINGLE, WeightFiles, read_header
from tests.models import build, tiny

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(3.0)}


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def change(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, data = split(folder / SINGLE)
        edit(header)
        (folder / SINGLE).write_bytes(join(header, data))

    return apply


def with_index(**weight_map: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / SINGLE).rename(folder / "one.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def twice(folder: Path) -> None:
    header, data = split(folder / SINGLE)
    text = json.dumps(header)
    (folder / SINGLE).write_bytes(join(text[:-1] + f', "a": {json.dumps(header["a"])}}}', data))


def in_two_files(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "two.safetensors")
    with_index(a="one.safetensors", b="one.safetensors", c="one.safetensors", d="two.safetensors")(folder)


def overlap(header: dict[str, Any]) -> None:
    header["b"]["data_offsets"] = [header["a"]["data_offsets"][0], header["a"]["data_offsets"][0] + 10]


ALL = {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda f: os.truncate(f / SINGLE, 100), SINGLE),
    "empty": (lambda f: os.truncate(f / SINGLE, 0), SINGLE),
    "too long": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"\0"), "takes?.* bytes"),
    "a huge header": (lambda f: (f / SINGLE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}"), SINGLE),
    "no header": (lambda f: (f / SINGLE).write_bytes(join("[]", b"")), SINGLE),
    "no JSON": (lambda f: (f / SINGLE).write_bytes(join('{"a": ', b"")), "no readable JSON"),
    "nested for ever": (lambda f: (f / SINGLE).write_bytes(join('{"a": ' + "[" * 10**6, b"")), "no readable JSON"),
    "an overlap": (change(overlap), "begins at byte"),
    "a larger shape": (change(lambda h: h["a"].update(shape=[3, 3])), "a has 36 bytes"),
    "a negative shape": (change(lambda h: h["a"].update(shape=[-2, -3])), "shape"),
    "a shape of floats": (change(lambda h: h["a"].update(shape=[2.0, 3])), "shape"),
    "a shape of truths": (change(lambda h: h["c"].update(shape=[True])), "shape"),
    "offsets backwards": (change(lambda h: h["a"]["data_offsets"].reverse()), "by its offsets"),
    "an unknown dtype": (change(lambda h: h["a"].update(dtype="F31")), "F31"),
    "an entry too many": (change(lambda h: h["a"].update(more=1)), "isn't described by"),
    "metadata of numbers": (change(lambda h: h.update(__metadata__={"a": 1})), "metadata"),
    "a name twice": (twice, "'a' twice"),
    "nothing there": (lambda f: (f / SINGLE).unlink(), "holds neither"),
    "an index out of the folder": (with_index(**{**ALL, "a": "../one.safetensors"}), "own folder"),
    "an index to the root": (with_index(**{**ALL, "a": "/etc/passwd"}), "own folder"),
    "an index to a missing file": (with_index(**{**ALL, "d": "two.safetensors"}), "two.safetensors, which isn't there"),
    "an index to a folder": (with_index(**{**ALL, "d": "sub"}), "isn't there or is no file"),
    "an index to what a file lacks": (with_index(**ALL, d="one.safetensors"), "and it doesn't"),
    "an index without a name": (with_index(a="one.safetensors", b="one.safetensors"), "doesn't say so"),
    "an index of numbers": (with_index(**{**ALL, "a": 1}), "no weight_map"),
    "a tensor in two files": (in_two_files, "two.safetensors"),
    "a config that is none": (lambda f: (f / "config.json").write_text("[1]"), "config.json holds no JSON object"),
    "a huge config": (lambda f: (f / "config.json").write_bytes(b" " * 10_000_001), "at most 10,000,000"),
    "a config of bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "config.json holds no readable"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folders_are_refused_by_name(folder, what):
    breaks, said = BROKEN[what]
    breaks(folder)
    with pytest.raises(BrokenWeightsError, match=said) as refusal:
        WeightFiles(folder)
    assert str(folder) in str(refusal.value)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder):
    with_index(**ALL, d="pipe")(folder)
    os.mkfifo(folder / "pipe")
    with pytest.raises(BrokenWeightsError, match="pipe"):
        WeightFiles(folder)


def test_links_out_of_the_folder_are_followed(folder, tmp_path_factory):
    """The Hub's cache is made of them."""
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (folder / SINGLE).rename(blob)
    (folder / SINGLE).symlink_to(blob)
    assert WeightFiles(folder).tensors.keys() == TENSORS.keys()


def test_a_file_that_changes_meanwhile_is_refused(folder):
    files = WeightFiles(folder)
    save_file({**TENSORS, "d": torch.ones(1)}, folder / SINGLE)
    with pytest.raises(BrokenWeightsError, match="has changed"):
        files.read("a", (0, 0), (2, 3))


def test_slices_and_how_much_was_read(folder):
    files = WeightFiles(folder)
    assert torch.equal(files.read("a", (1, 1), (1, 2)), TENSORS["a"][1:2, 1:3])
    assert files.bytes_read == 2 * 4
    assert torch.equal(files.read("b", (1,), (3,)), TENSORS["b"][1:4])
    assert torch.equal(files.read("c", (), ()), TENSORS["c"])
    assert files.bytes_read == 2 * 4 + 3 * 2 + 4


@pytest.fixture(scope="module")
def model_and_files(tmp_path_factory) -> tuple[torch.nn.Module, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("sound")
    config = tiny("mixtral", num_hidden_layers=1, hidden_size=8, head_dim=4, intermediate_size=4, vocab_size=8)
    build(config, seed=2).save_pretrained(folder, save_original_format=False, max_shard_size="2KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return build(config, seed=1), {
        p.name: p.read_bytes() for p in folder.iterdir() if p.name != "generation_config.json"
    }


VALUES = st.sampled_from(
    [None, -1, 0, 1, 2.5, 2**31, 2**63, 2**64, True, "F32", "F64", "F4", "..", [], [0], [8, 8], {}]
)


@st.composite
def mutations(draw: Any) -> list[tuple[str, int, int, Any]]:
    kinds = st.sampled_from(["flip", "cut", "insert", "length", "header", "swap", "json", "drop", "rename", "repeat"])
    numbers = st.integers(0, 2**32 - 1)
    return draw(st.lists(st.tuples(kinds, numbers, numbers, VALUES), min_size=1, max_size=3))


def mutate(files: dict[str, bytes], kind: str, first: int, second: int, value: Any) -> None:
    name = sorted(files)[first % len(files)]
    content = bytearray(files[name])
    binary = name.endswith(".safetensors")
    # Most of a header is sizes and names: that is where it matters.
    reach = min(len(content), 2000) or 1
    if kind == "flip" and content:
        content[second % reach] ^= 1 << (second >> 16) % 8
    elif kind == "cut":
        del content[second % (len(content) + 1) :]
    elif kind == "insert":
        content[second % reach : second % reach] = bytes([second >> 16 & 255])
    elif kind == "length" and binary:
        content[: 1 + second % 8] = bytes([(second >> 8) & 255] * (1 + second % 8))
    elif kind == "drop":
        del files[name]
        return
    elif kind == "rename":
        files[f"{second % 3}.safetensors"] = files.pop(name)
        return
    elif kind == "repeat":
        content = content * 2
    elif kind in ("header", "swap", "json"):
        try:
            length = int.from_bytes(content[:8], "little") if binary else len(content)
            start = 8 if binary else 0
            parsed = json.loads(bytes(content[start : start + length]))
            data = bytes(content[start + length :]) if binary else b""
            inside(parsed, kind, second, value)
        except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError):
            return
        content = bytearray(join(parsed, data) if binary else json.dumps(parsed).encode())
    files[name] = bytes(content)


def inside(parsed: dict[str, Any], kind: str, second: int, value: Any) -> None:
    at = parsed.get("weight_map", parsed)
    names = sorted(at)
    name, other = names[second % len(names)], names[(second >> 8) % len(names)]
    if kind == "swap":
        at[name], at[other] = at[other], at[name]
    elif kind == "header" and isinstance(at[name], dict):
        fields = sorted(at[name])
        field = fields[(second >> 16) % len(fields)]
        at[name][field] = value if second & 1 or not isinstance(at[name][field], list) else [*at[name][field], value]
    else:
        at[name] = value


def refused_or_as_it_says(model: torch.nn.Module, files: dict[str, bytes], folder: Path) -> bool:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refusal = ""
    try:
        load_pretrained(model, folder)
    except SetupError as error:
        refusal = str(error)
    if refusal:
        assert str(folder) in refusal
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return True
    # Whatever was taken, safetensors' own reader takes it too, and finds the same in it.
    said = json.loads(files[INDEX])["weight_map"].values() if SINGLE not in files else [SINGLE]
    theirs = {name: value for file in set(said) for name, value in load_file(folder / file).items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), theirs[name].to(value.dtype).nan_to_num()), name
    model.load_state_dict(before)
    return False


def test_mutated_folders_are_refused_or_loaded_as_they_say(model_and_files, tmp_path_factory):
    refused = []

    @settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @given(changes=mutations())
    def mutated(changes: list[tuple[str, int, int, Any]]) -> None:
        files = dict(model_and_files[1])
        for change in changes:
            if files:
                mutate(files, *change)
        refused.append(refused_or_as_it_says(model_and_files[0], files, tmp_path_factory.mktemp("mutated")))

    mutated()
    assert len(refused) >= 300
    assert 100 < sum(refused) < len(refused) - 20


def test_headers_of_files_without_tensors(tmp_path):
    (tmp_path / SINGLE).write_bytes(join({}, b""))
    assert read_header(tmp_path / SINGLE) == {}
