# SPDX-License-Identifier: Apache-2.0
"""The wheel and the sdist, built as ``python -m build`` builds them, without an isolated environment to download."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Distributions:
    """Paths of both files."""

    wheel: Path
    sdist: Path

    def in_the_wheel(self) -> dict[str, bytes]:
        """Content by name."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def in_the_sdist(self) -> set[str]:
        """Names below its one folder."""
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in archive.getnames()}

    def unpacked(self, folder: Path) -> Path:
        """The sdist's folder, below ``folder``."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = folder.iterdir()
        return unpacked

    def metadata(self) -> str:
        """The wheel's METADATA."""
        return next(
            content.decode() for name, content in self.in_the_wheel().items() if name.endswith(".dist-info/METADATA")
        )


def build(source: Path, target: Path, *only: str) -> list[Path]:
    """Build what stands in ``source`` into ``target``; the files that are there then."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target), *only]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(target.iterdir())


def files(folder: Path) -> set[str]:
    """Names below a folder of this repository, without what Python leaves there."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not {"__pycache__", "runs"} & set(path.parts)}
