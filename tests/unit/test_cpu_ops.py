"""The build lock of DeepSpeed's CPU op, and where its compiler driver is looked for. Nothing is compiled here."""

import os
import re
import sysconfig
import time
from pathlib import Path

import pytest

from lightning_zero3 import cpu_ops
from lightning_zero3.cpu_ops import STALE_AFTER_SECONDS, StaleBuildLockError, check_build_lock, make_ninja_visible


def lock_of_age(folder: Path, seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    written = time.time() - seconds
    os.utime(lock, (written, written))
    return lock


def test_no_lock_passes(tmp_path: Path) -> None:
    check_build_lock(tmp_path)
    check_build_lock(tmp_path / "never built")


@pytest.mark.parametrize("age", [0, STALE_AFTER_SECONDS / 2])
def test_a_lock_that_a_living_build_may_hold_passes_and_stays(tmp_path: Path, age: float) -> None:
    lock = lock_of_age(tmp_path, age)
    check_build_lock(tmp_path)
    assert lock.exists()


def test_an_abandoned_lock_is_named_with_its_age_and_left_for_the_user_to_delete(tmp_path: Path) -> None:
    lock = lock_of_age(tmp_path, 3 * STALE_AFTER_SECONDS)
    with pytest.raises(StaleBuildLockError) as caught:
        check_build_lock(tmp_path)
    assert str(lock) in str(caught.value)
    assert "45 minutes" in str(caught.value)
    assert "delete that file" in str(caught.value)
    assert lock.exists()


def test_the_build_folder_is_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert cpu_ops.extensions_dir() == tmp_path / cpu_ops.OP_NAME


def test_the_op_has_the_name_that_deepspeed_builds_it_under() -> None:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    # torch names the build folder after the op: another name would look for the lock in another place.
    assert ShareMemCommBuilder().name == cpu_ops.OP_NAME


def test_preparing_stops_at_an_abandoned_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored if ninja has to be made visible
    cpu_ops.prepare()
    lock_of_age(cpu_ops.extensions_dir(), 2 * STALE_AFTER_SECONDS)
    with pytest.raises(StaleBuildLockError, match=re.escape(str(tmp_path))):
        cpu_ops.prepare()


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


def test_a_ninja_that_is_found_already_leaves_the_path_alone(scripts: Path) -> None:
    executable(scripts)
    before = os.environ["PATH"]
    executable(Path(before))
    make_ninja_visible()
    assert os.environ["PATH"] == before


def test_without_any_ninja_the_path_stays(scripts: Path) -> None:
    before = os.environ["PATH"]
    make_ninja_visible()
    assert os.environ["PATH"] == before
