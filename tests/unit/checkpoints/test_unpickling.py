# SPDX-License-Identifier: Apache-2.0
"""Files are read whole and unharmed, or refused; what is read can't run anything."""

import argparse
import collections
import pathlib
import pickle
import random
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zero3.checkpoints.manifest import MANIFEST, DamagedCheckpointError, Manifest, measure, verify, write
from lightning_zero3.checkpoints.unpickling import UntrustedCheckpointError, check_sums, read

# Of a shard: what DeepSpeed's and Lightning's entries are made of.
CONTENT: dict[str, Any] = {
    "tensors": [torch.arange(300.0), torch.ones(3, 5, dtype=torch.bfloat16), torch.tensor(3)],
    "numbers": {"epoch": 3, "lr": 1e-3, "name": "x" * 40, "none": None, "flags": (True, False)},
    "hyperparameters": {"path": pathlib.Path("/a/b"), "more": argparse.Namespace(width=3)},
    "random": [np.random.get_state(), np.float64(1.5), np.arange(3)],
}


class Theirs:
    """A class of the user's own."""


def test_deepspeeds_own_objects_come_back(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    scaler = DynamicLossScaler(2**9, 7, 1, 2, False)
    scaler.cur_iter, scaler.cur_scale = 5, 256.0
    objects = [scaler, LossScaler(3.0), *ZeroStageEnum, *OffloadDeviceEnum]
    torch.save(objects, tmp_path / "shard.pt")
    found = read(tmp_path / "shard.pt", trust=False)
    assert [vars(each) for each in found[:2]] == [vars(each) for each in objects[:2]]
    assert found[2:] == objects[2:]


class MadeOfADict(dict):
    """As Lightning's ``AttributeDict``."""


class Evil:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left):
        return torch.is_tensor(right) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("mapped", [False, True])
def test_what_checkpoints_hold_comes_back(tmp_path, mapped):
    path = tmp_path / "shard.pt"
    torch.save(CONTENT, path)
    assert check_sums(path, own_name=True)
    assert same(read(path, trust=False, mapped=mapped), CONTENT)
    torch.save(CONTENT, path, _use_new_zipfile_serialization=False)
    assert not check_sums(path)
    assert same(read(path, trust=False, mapped=mapped), CONTENT)


@pytest.mark.parametrize(
    "evil",
    [
        Evil(exec, "open('ran', 'w')"),
        Evil(eval, "open('ran', 'w')"),
        Evil(open, "ran", "w"),
        Evil(pathlib.Path.touch, pathlib.Path("ran")),
        Evil(pickle.loads, pickle.dumps(Evil(open, "ran", "w"))),
        Evil(torch.load, "other"),
        Evil(getattr, "x", "join"),
    ],
)
def test_nothing_is_called(tmp_path, monkeypatch, evil):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": [evil]}, "shard.pt")
    for mapped in (False, True):
        with pytest.raises(UntrustedCheckpointError, match=r"shard\.pt holds .*trust_checkpoint=True"):
            read(pathlib.Path("shard.pt"), trust=False, mapped=mapped)
    assert not pathlib.Path("ran").exists()


def test_a_class_is_allowed_by_name_or_by_trust(tmp_path):
    path, before = tmp_path / "shard.pt", torch.serialization.get_safe_globals()
    torch.save(Theirs(), path)
    with pytest.raises(UntrustedCheckpointError) as refused:
        read(path, trust=False)
    assert f"{path} holds {Theirs.__module__}.Theirs" in str(refused.value)
    assert f"torch.serialization.add_safe_globals([{Theirs.__module__}.Theirs])" in str(refused.value)
    assert isinstance(read(path, trust=True), Theirs)
    with torch.serialization.safe_globals([Theirs]):
        assert isinstance(read(path, trust=False), Theirs)
        # Nothing is allowed beyond a call, and nothing forgotten.
        assert set(torch.serialization.get_safe_globals()) == {*before, Theirs}
        torch.serialization.add_safe_globals([argparse.Namespace])
        read(path, trust=False)
        assert set(torch.serialization.get_safe_globals()) == {*before, Theirs, argparse.Namespace}
    for each in (MadeOfADict(a=1), collections.defaultdict(list, a=[1])):
        # torch fills plain dicts only.
        torch.save(each, path)
        with pytest.raises(UntrustedCheckpointError, match=f"holds .*{type(each).__name__}"):
            read(path, trust=False)


def test_any_damage_is_noticed(tmp_path):
    """Bytes at random places: refused, or in a place that means nothing and the content is the same."""
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(CONTENT, path)
    whole, generator, harmless = path.read_bytes(), random.Random(5), 0
    write(tmp_path, Manifest("tag", {}, files={path.name: measure(path)}))
    assert verify(tmp_path, [path.name])
    # Beside those of chance: every byte of the archive's own headers, where lengths and offsets are.
    headers = [each.header_offset + k for each in zipfile.ZipFile(path).infolist() for k in range(0, 64, 3)]
    places = [generator.randrange(len(whole)) for _ in range(300)]
    changes = [(place, None) for place in (*headers, *range(len(whole) - 900, len(whole), 3), *places)]
    cuts = [(place, "cut") for place in (0, 1, 30, *(generator.randrange(len(whole)) for _ in range(60)))]
    for place, how in [*changes, *cuts]:
        content = bytearray(whole)
        if how == "cut":
            content = content[:place]
        else:
            content[place] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=path.name):
            verify(tmp_path, [path.name])
        try:
            check_sums(path, own_name=True)
            found = read(path, trust=False, mapped=True)
        except (DamagedCheckpointError, UntrustedCheckpointError) as refused:
            assert path.name in str(refused)  # noqa: PT017
        else:
            assert same(found, CONTENT), (place, how)
            harmless += 1
    assert harmless < len(changes) / 2
    assert (tmp_path / MANIFEST).exists()


def test_a_file_without_sums_is_read_and_told(tmp_path):
    path = tmp_path / "shard.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert not check_sums(path)
    assert same(read(path, trust=False), CONTENT)


def test_a_file_under_another_name_is_refused(tmp_path):
    torch.save(CONTENT, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    moved = (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").rename(tmp_path / "zero_pp_rank_1.pt")
    assert check_sums(moved)
    with pytest.raises(DamagedCheckpointError, match=r"was written as zero_pp_rank_0_mp_rank_00_optim_states\.pt"):
        check_sums(moved, own_name=True)


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", b"no checkpoint at all", bytes(100)])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "shard.pt"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"shard\.pt"):
        _ = (check_sums(path), read(path, trust=False))
