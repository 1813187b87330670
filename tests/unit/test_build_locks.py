# SPDX-License-Identifier: Apache-2.0
"""Who holds a build lock: told by who has the file open, as torch's own lock does."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from lightning_zero3 import build_locks
from lightning_zero3.cpu_ops import OP_NAME
from tests.fits import Pairs, Regression, fit

# A process that takes torch's lock and is killed holding it, or lives on.
HOLD = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUILT_OPS", os.environ["TORCH_EXTENSIONS_DIR"])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    return path


def test_torchs_own_lock_is_held_until_it_is_released(lock: Path) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    (seen,) = build_locks.find()
    assert (seen.state, seen.op) == ("held", "fused_adam")
    assert f"process {os.getpid()} " in seen.seen
    baton.release()
    assert build_locks.find() == []


def test_the_lock_of_a_killed_process_is_abandoned(lock: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert build_locks.judge(lock).state == "held"
        holder.kill()
    seen = build_locks.judge(lock)
    assert seen.state == "abandoned"
    assert seen.remedy == f"delete it: rm {lock}"


def test_another_users_lock_can_not_be_judged(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    seen = build_locks.judge(lock)
    assert seen.state == "unknown"
    assert "another user" in seen.seen


def test_on_a_shared_file_system_another_machine_may_hold_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(build_locks, "_filesystem_of", lambda path: "nfs4")
    assert build_locks.judge(lock).state == "unknown"
    long_ago = lock.stat().st_mtime - 2 * build_locks.QUIET_BUILD_SECONDS
    os.utime(lock, (long_ago, long_ago))
    assert build_locks.judge(lock).state == "abandoned"


def test_without_a_folder_of_the_users_all_that_runs_use_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    from torch.utils.cpp_extension import _get_build_directory

    (Path(_get_build_directory("an_op", verbose=False)) / "lock").touch()
    ours = tmp_path / "environment" / "torch_extensions" / "another_op"
    ours.mkdir(parents=True)
    (ours / "lock").touch()
    assert {seen.op for seen in build_locks.find()} == {"an_op", "another_op"}


def a_fit(folder: str) -> list[str]:
    os.environ["TORCH_EXTENSIONS_DIR"], before = folder, os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Regression(), Pairs(), "zero3_fast", steps=1)
        return [str(each.message) for each in caught]
    finally:
        del os.environ["TORCH_EXTENSIONS_DIR"]
        if before is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = before


def test_a_fit_names_a_lock_that_would_make_it_wait_for_ever(lock: Path, ranks: Any) -> None:
    lock.touch()
    # The op that every fit loads is there already: compiling it takes half a minute.
    built = Path(os.environ["BUILT_OPS"]) / OP_NAME
    if built.exists():
        (lock.parent.parent / OP_NAME).symlink_to(built)
    (warned,) = ranks(1).run(a_fit, str(lock.parent.parent))
    (about,) = (each for each in warned if str(lock) in each)
    assert "fused_adam waits for it for ever" in about
    assert f"rm {lock}" in about
