# SPDX-License-Identifier: Apache-2.0
"""A manifest: what was written is what is read, and damage is named."""

import subprocess
from pathlib import Path

import pytest

from lightning_zero3.checkpoints import manifest
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError, Manifest, Written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    for name in ("a", "b"):
        (tmp_path / "checkpoint" / f"{name}.pt").write_bytes(name.encode() * 1000)
    (tmp_path / "latest").write_text("checkpoint")
    names = ("checkpoint/a.pt", "checkpoint/b.pt", "latest")
    files = {name: manifest.measure(tmp_path / name) for name in names}
    manifest.write(tmp_path, Manifest("checkpoint", {"ranks": 2}, files=files))
    return tmp_path


def test_what_was_written_is_read_and_verified(folder):
    read = manifest.read(folder)
    assert read.tag == "checkpoint"
    assert read.layout == {"ranks": 2}
    assert read.weights_only is False
    assert read.files["checkpoint/a.pt"].size == 1000
    summed = subprocess.run(["sha256sum", folder / "checkpoint" / "a.pt"], capture_output=True, text=True, check=True)
    assert read.files["checkpoint/a.pt"].sha256 == summed.stdout.split()[0]
    assert manifest.verify(folder) is True
    assert [path.name for path in folder.iterdir() if "unfinished" in path.name] == []


def test_without_a_manifest_nothing_is_known(folder):
    (folder / "manifest.json").unlink()
    assert manifest.verify(folder) is False


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "checkpoint" / "b.pt").unlink(), r"b\.pt is missing"),
        (lambda folder: (folder / "latest").unlink(), "latest is missing"),
        (lambda folder: (folder / "checkpoint" / "b.pt").write_bytes(b"b" * 999), r"b\.pt has 999 bytes.* 1,000"),
        (lambda folder: (folder / "checkpoint" / "b.pt").write_bytes(b"c" * 1000), r"b\.pt has SHA-256"),
        (lambda folder: (folder / "checkpoint" / "c.pt").write_bytes(b"c"), r"c\.pt isn't of this checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json can't be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 9}'), "format 9"),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(DamagedCheckpointError, match=message):
        manifest.verify(folder)


def test_contents_are_read_of_the_files_that_are_asked_for(folder):
    (folder / "checkpoint" / "b.pt").write_bytes(b"c" * 1000)
    assert manifest.verify(folder, ["checkpoint/a.pt"])
    assert manifest.verify(folder, checksums=False)
    with pytest.raises(DamagedCheckpointError, match=r"b\.pt has SHA-256"):
        manifest.verify(folder, ["checkpoint/b.pt"])
    with pytest.raises(DamagedCheckpointError, match=r"z\.pt isn't of this checkpoint"):
        manifest.verify(folder, ["checkpoint/z.pt"])
    # Which files there are is seen whatever is asked for.
    (folder / "checkpoint" / "b.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"b\.pt is missing"):
        manifest.verify(folder, ["checkpoint/a.pt"])


def test_a_manifest_that_cannot_be_written_leaves_none(folder, tmp_path):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json.unfinished").mkdir()
    with pytest.raises(OSError, match="directory"):
        manifest.write(folder, Manifest("checkpoint", {"ranks": 1}, files={"latest": Written(1, "0")}))
    assert manifest.read(folder) is None
