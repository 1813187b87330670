# SPDX-License-Identifier: Apache-2.0
"""docs/upstream: each fault has a script, a page and a row, and the index says what the script prints."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "upstream"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "reproduce")
# One of Lightning, DeepSpeed with and without Transformers; the others are no different, and cost 4 seconds each.
QUICK = {
    "autoep_output_recorders",
    "dead_alias_comparison",
    "unused_parameter_moves",
}
EXIT_CODES = {"present": 1, "fixed": 0, "can't tell": 2}
BEGINNINGS = {"present": "FAULT PRESENT: ", "fixed": "fixed: ", "can't tell": "can't tell: "}
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
CHANGED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
INSTALLED = Path(sysconfig.get_path("purelib"))
COPIED = {"deepspeed", "lightning"}
OPS = "ops"
BUILD = "from lightning_zero3 import cpu_ops; cpu_ops.build()"


def rows() -> dict[str, dict[str, str]]:
    """The index: a fault's name → its cells by their heading."""
    table = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in (FOLDER / "README.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    headings, found = table[0], {}
    for cells in table[1:]:
        match = re.search(r"\((\w+)\.py\)", " ".join(cells))
        if match is None:
            continue  # another table
        found[match[1]] = dict(zip(headings, cells, strict=True))
    return found


def verdict(name: str) -> str:
    installed = importlib.metadata.version("deepspeed")
    said = rows()[name].get(installed)
    if said is None:
        pytest.skip(f"the index has no column for deepspeed {installed}")
    return said


def run(name: str, **changed: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "", **changed}
    for set_by_a_launcher in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(set_by_a_launcher, None)
    return subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_every_script_has_its_page_and_its_row():
    assert SCRIPTS
    assert list(rows()) == sorted(rows()) == SCRIPTS
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(SCRIPTS)
    for name in SCRIPTS:
        page = (FOLDER / f"{name}.md").read_text()
        for heading in ("## What", "## Why", "## Proposed change", "## How to test"):
            assert heading in page, (name, heading)
        assert DIFF.search(page) or "no diff" in page, (
            f"{name}: neither a change that can be tried nor why there is none"
        )
        assert f"({name}.md)" in rows()[name]["fault"]
        # A script for another project's maintainer stands without ours.
        assert "lightning_zero3" not in (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]
)
def test_the_index_says_what_a_script_prints(name):
    said = verdict(name)
    ended = run(name)
    assert ended.stdout.startswith(BEGINNINGS[said]), ended.stdout + ended.stderr
    assert ended.returncode == EXIT_CODES[said]
    assert ended.stdout.count("\n") == 1, "one line"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> Path:
    """A copy of the packages that most of the changes are proposed for."""
    folder = tmp_path_factory.mktemp("upstream")
    for package in COPIED:
        shutil.copytree(INSTALLED / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    build_ops(folder, folder / OPS)
    return folder


def build_ops(packages: Path, ops: Path) -> dict[str, str]:
    """Compile DeepSpeed's op for what is in ``packages``: from another folder it's another one, and takes a minute."""
    environment = {"PYTHONPATH": str(packages), "TORCH_EXTENSIONS_DIR": str(ops)}
    subprocess.run([sys.executable, "-c", BUILD], env={**os.environ, **environment}, check=True, capture_output=True)
    return environment


def link_packages(folder: Path, changed: list[Path]) -> None:
    """Offer installed packages in ``folder`` as links, with real copies of the files that are to be changed.

    Only the folders on the way to such a file are real: torch is too large to copy, or to link file by file.
    """
    for path in changed:
        for parent in reversed(path.parents[:-1]):
            if (folder / parent).is_symlink():
                (folder / parent).unlink()
            (folder / parent).mkdir(exist_ok=True)
            for entry in (INSTALLED / parent).iterdir():
                link = folder / parent / entry.name
                if entry.name != "__pycache__" and not link.exists():
                    link.symlink_to(entry)
        if (INSTALLED / path).exists():
            (folder / path).unlink()
            shutil.copy(INSTALLED / path, folder / path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.md")) if DIFF.search(path.read_text())])
def test_the_proposed_change_mends(upstream, tmp_path, name):
    if importlib.metadata.version("deepspeed") != "0.19.8" or shutil.which("patch") is None:
        pytest.skip(
            "the changes are proposed for deepspeed 0.19.8, lightning 2.6.6, transformers 5.24 and torch 2.13, and "
            "need `patch`"
        )
    match = DIFF.search((FOLDER / f"{name}.md").read_text())
    assert match
    changed = [Path(path) for path in CHANGED.findall(match[1]) if Path(path).parts[0] not in COPIED]
    packages = {path.parts[0] for path in changed}
    link_packages(upstream, changed)

    def apply(*options: str) -> None:
        command = ["patch", "--strip=1", "--fuzz=0", *options]
        subprocess.run(command, input=match[1], cwd=upstream, text=True, check=True, capture_output=True)

    apply()
    try:
        environment = build_ops(upstream, (tmp_path if "torch" in packages else upstream) / OPS)
        ended = run(name, **environment)
    finally:
        apply("--reverse")
        for package in packages:
            shutil.rmtree(upstream / package)
    assert ended.stdout.startswith("fixed: "), ended.stdout + ended.stderr
    assert ended.returncode == 0
