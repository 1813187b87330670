# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's way to its path and from it, killed after each of its file operations."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_zero3.checkpoints import commit, manifest
from lightning_zero3.checkpoints.manifest import Manifest

# Of Python's audit events, those of calls that change what is on the disk.
_CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink", "shutil.rmtree")
_watch: dict[str, Any] = {"left": None}


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch["left"] is not None and (event in _CHANGES or (event == "open" and arguments[1] == "w")):
        _watch["left"] -= 1
        if _watch["left"] < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: Path, text: str) -> None:
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "shard").write_text(text)
    (folder / "latest").write_text("checkpoint")
    names = ("checkpoint/shard", "latest")
    files = {name: manifest.measure(folder / name) for name in names}
    manifest.write(folder, Manifest("checkpoint", {"ranks": 1}, files=files))


def save(path: Path, text: str) -> None:
    staging = commit.begin(path)
    fill(staging.folder, text)
    commit.complete(staging)


def held_by(path: Path) -> str | None:
    """What a load finds at a path; it must be whole."""
    found = commit.survivor(path)
    if not os.path.lexists(found):
        return None
    assert manifest.verify(found)
    return (found / "checkpoint" / "shard").read_text()


def killed_after(changes: int, action: Callable[[], None]) -> bool:
    """Run it in a child that is killed before its next change; whether it was."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(_count)
        _watch["left"] = changes
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def every_kill(make: Callable[[Path], Path], action: Callable[[Path], None], tmp_path: Path) -> list[Path]:
    """A folder for each place at which the action is killed, and a last one in which it wasn't."""
    paths = []
    while True:
        (tmp_path / f"{len(paths)}").mkdir()
        paths.append(make(tmp_path / f"{len(paths)}"))
        if not killed_after(len(paths) - 1, lambda: action(paths[-1])):
            return paths


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_anywhere_leaves_the_old_one_or_the_new_one(exchange, tmp_path, monkeypatch):
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda new, path: False)

    def with_an_old_one(folder: Path) -> Path:
        save(folder / "last.ckpt", "old")
        return folder / "last.ckpt"

    found = []
    for path in every_kill(with_an_old_one, lambda path: save(path, "new"), tmp_path):
        found.append(held_by(path))
        # Whoever doesn't know about survivors finds one of both all the same, where two can change places.
        assert path.exists() or not exchange
        # The next save clears up, of another path as well.
        save(path.parent / "other.ckpt", "other")
        assert held_by(path) == found[-1]
        assert path.exists()
        save(path, "newer")
        assert held_by(path) == "newer"
        assert sorted(each.name for each in path.parent.iterdir()) == ["last.ckpt", "other.ckpt"]
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)
    assert len(found) > 15


def test_a_first_save_is_there_as_a_whole_or_not_at_all(tmp_path):
    paths = every_kill(lambda folder: folder / "a.ckpt", lambda path: save(path, "new"), tmp_path)
    found = [held_by(path) for path in paths]
    assert set(found) == {None, "new"}
    assert [path.exists() for path in paths if held_by(path) is None] == [False] * found.count(None)


def test_what_is_removed_is_whole_or_gone(tmp_path):
    def make(folder: Path) -> Path:
        save(folder / "a.ckpt", "old")
        return folder / "a.ckpt"

    found = []
    for path in every_kill(make, commit.remove, tmp_path):
        found.append(held_by(path))
        save(path.parent / "b.ckpt", "b")
        assert {each.name for each in path.parent.iterdir()} <= {"a.ckpt", "b.ckpt"}
    assert set(found) == {"old", None}


@pytest.mark.parametrize("before", ["link", "folder"])
def test_a_link_always_means_something(before, tmp_path):
    def make(folder: Path) -> Path:
        save(folder / "a.ckpt", "a")
        save(folder / "b.ckpt", "b")
        if before == "link":
            commit.link(folder / "a.ckpt", folder / "last.ckpt")
        else:
            save(folder / "last.ckpt", "a")
        return folder / "last.ckpt"

    found = []
    for path in every_kill(make, lambda path: commit.link(path.parent / "b.ckpt", path), tmp_path):
        found.append(held_by(path))
        assert path.exists()
        save(path.parent / "c.ckpt", "c")
        assert (path.parent / ".saving").exists() is False
    assert set(found) == {"a", "b"}
    assert os.readlink(path) == "b.ckpt"
    assert commit.is_linked(path.parent / "b.ckpt")
    assert not commit.is_linked(path.parent / "a.ckpt")
    assert not commit.is_linked(path)
    commit.remove(path)
    assert not os.path.lexists(path)
    assert held_by(path.parent / "b.ckpt") == "b"


def test_a_checkpoint_takes_the_place_of_a_link_not_of_what_it_means(tmp_path):
    save(tmp_path / "a.ckpt", "a")
    commit.link(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    save(tmp_path / "last.ckpt", "new")
    assert held_by(tmp_path / "a.ckpt") == "a"
    assert held_by(tmp_path / "last.ckpt") == "new"
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_what_another_process_is_writing_stays(tmp_path):
    theirs = commit.begin(tmp_path / "a.ckpt")
    fill(theirs.folder, "a")
    save(tmp_path / "b.ckpt", "b")
    assert theirs.folder.exists()
    with pytest.raises(OSError, match="Another process is saving"):
        commit.begin(tmp_path / "a.ckpt")
    commit.complete(theirs)
    assert held_by(tmp_path / "a.ckpt") == "a"


def test_a_save_that_is_given_up_leaves_what_was_there(tmp_path):
    save(tmp_path / "a.ckpt", "old")
    staging = commit.begin(tmp_path / "a.ckpt")
    fill(staging.folder, "new")
    commit.abandon(staging)
    assert held_by(tmp_path / "a.ckpt") == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        commit.begin(tmp_path / "file" / "a.ckpt")
