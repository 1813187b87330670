# SPDX-License-Identifier: Apache-2.0
"""The build lock of DeepSpeed's CPU op, and where its compiler driver is looked for. Nothing is compiled here."""

import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_zero3 import cpu_ops
from lightning_zero3.cpu_ops import (
    OP_NAME,
    QUIET_BUILD_SECONDS,
    QUIET_LOAD_SECONDS,
    StaleBuildLockError,
    await_build_lock,
    keep_builds_apart,
    make_ninja_visible,
)


def of_age(path: Path, seconds: float) -> Path:
    path.touch()
    written = time.time() - seconds
    os.utime(path, (written, written))
    return path


class Clock:
    """Time that passes by sleeping, and a thing that happens at a moment of it."""

    def __init__(self, at: float = float("inf"), happens: Callable[[], None] = lambda: None) -> None:
        self.slept, self.at, self.happens = 0.0, at, happens

    def now(self) -> float:
        return time.time() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.slept >= self.at:
            self.at = float("inf")
            self.happens()


def wait(folder: Path, clock: Clock) -> None:
    await_build_lock(folder, now=clock.now, sleep=clock.sleep)


def test_no_lock_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    wait(tmp_path, clock)
    wait(tmp_path / "never built", clock)
    assert clock.slept == 0


@pytest.mark.parametrize("built", [True, False])
def test_a_lock_is_waited_for_until_its_holder_is_done(tmp_path: Path, built: bool) -> None:
    if built:
        of_age(tmp_path / f"{OP_NAME}.so", 10_000)
    lock = of_age(tmp_path / "lock", 0)
    clock = Clock(at=5, happens=lock.unlink)
    wait(tmp_path, clock)
    assert 5 <= clock.slept < 6


@pytest.mark.parametrize(("built", "limit"), [(True, QUIET_LOAD_SECONDS), (False, QUIET_BUILD_SECONDS)])
def test_a_lock_whose_process_is_gone_is_removed_with_a_warning(tmp_path: Path, built: bool, limit: int) -> None:
    if built:
        of_age(tmp_path / f"{OP_NAME}.so", 10_000)
    lock = of_age(tmp_path / "lock", 0)
    clock = Clock()
    with pytest.warns(UserWarning, match=re.escape(str(lock))):
        wait(tmp_path, clock)
    assert limit <= clock.slept <= limit + 2
    assert not lock.exists()


def test_a_lock_that_a_living_process_holds_is_waited_for(tmp_path: Path) -> None:
    of_age(tmp_path / f"{OP_NAME}.so", 10_000)
    lock = tmp_path / "lock"
    # As torch's FileBaton does: the file stays open as long as the lock is held.
    with lock.open("x"):
        of_age(lock, 1000)
        clock = Clock(at=100, happens=lock.unlink)
        wait(tmp_path, clock)
    assert clock.slept >= 100


def test_another_users_lock_is_left_alone_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = of_age(tmp_path / "lock", 1000)
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    with pytest.raises(StaleBuildLockError, match="belongs to another user"):
        wait(tmp_path, Clock())
    assert lock.exists()


def test_a_build_that_still_writes_is_waited_for_however_long_it_takes(tmp_path: Path) -> None:
    lock = of_age(tmp_path / "lock", 0)

    class Building(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.slept % 100 == 0:
                compiled = tmp_path / "shm.o"
                compiled.touch()
                os.utime(compiled, (self.now(), self.now()))

    clock = Building(at=10 * QUIET_BUILD_SECONDS, happens=lock.unlink)
    wait(tmp_path, clock)
    assert clock.slept >= 10 * QUIET_BUILD_SECONDS


def test_the_build_folder_is_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert cpu_ops.extensions_dir() == tmp_path / cpu_ops.OP_NAME


def test_the_op_has_the_name_that_deepspeed_builds_it_under() -> None:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    # torch names the build folder after the op: another name would look for the lock in another place.
    assert ShareMemCommBuilder().name == cpu_ops.OP_NAME


def test_preparing_clears_an_abandoned_lock_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored if ninja has to be made visible
    cpu_ops.prepare()
    lock = of_age(cpu_ops.extensions_dir() / "lock", 2 * QUIET_BUILD_SECONDS)
    with pytest.warns(UserWarning, match=re.escape(str(tmp_path))):
        cpu_ops.prepare()
    assert not lock.exists()


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scripts folder of an environment that isn't activated, and a PATH without it."""
    folder, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"scripts": str(folder)}[name])
    return folder


def executable(folder: Path) -> None:
    (folder / "ninja").touch(mode=0o755)


def test_ninja_of_the_environment_is_found_first_and_the_rest_of_the_path_stays(scripts: Path) -> None:
    executable(scripts)
    before = os.environ["PATH"]
    make_ninja_visible()
    assert os.environ["PATH"] == f"{scripts}{os.pathsep}{before}"
    make_ninja_visible()
    assert os.environ["PATH"] == f"{scripts}{os.pathsep}{before}"  # not once more: it's found now


def test_another_ninja_that_is_found_first_gives_way_to_the_environments_own(scripts: Path) -> None:
    executable(scripts)
    before = os.environ["PATH"]
    executable(Path(before))
    make_ninja_visible()
    assert os.environ["PATH"] == f"{scripts}{os.pathsep}{before}"


def test_without_one_of_the_environments_own_another_is_used(scripts: Path) -> None:
    before = os.environ["PATH"]
    executable(Path(before))
    make_ninja_visible()
    assert os.environ["PATH"] == before


def test_builds_go_to_the_environments_own_folder_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "elsewhere")
    keep_builds_apart()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    keep_builds_apart()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")


def test_without_any_ninja_the_path_stays(scripts: Path) -> None:
    before = os.environ["PATH"]
    make_ninja_visible()
    assert os.environ["PATH"] == before
