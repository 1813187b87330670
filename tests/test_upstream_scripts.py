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


def run(name: str, packages: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": packages}
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
    """A copy of what the changes are proposed for."""
    folder, installed = tmp_path_factory.mktemp("upstream"), Path(sysconfig.get_path("purelib"))
    for package in ("deepspeed", "lightning"):
        shutil.copytree(installed / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.md")) if DIFF.search(path.read_text())])
def test_the_proposed_change_mends(upstream, name):
    if importlib.metadata.version("deepspeed") != "0.19.8" or shutil.which("patch") is None:
        pytest.skip("the changes are proposed for deepspeed 0.19.8, and need `patch`")
    match = DIFF.search((FOLDER / f"{name}.md").read_text())
    assert match
    # torch is too large to copy: links, and the files that change.
    of_torch = re.findall(r"^--- a/(torch/\S+)", match[1], re.MULTILINE)
    if of_torch:
        installed = Path(sysconfig.get_path("purelib"))
        shutil.copytree(
            installed / "torch",
            upstream / "torch",
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for file in of_torch:
            (upstream / file).unlink()
            shutil.copyfile(installed / file, upstream / file)

    def apply(*options: str) -> None:
        command = ["patch", "--strip=1", "--fuzz=0", *options]
        subprocess.run(command, input=match[1], cwd=upstream, text=True, check=True, capture_output=True)

    apply()
    try:
        ended = run(name, str(upstream))
    finally:
        apply("--reverse")
        shutil.rmtree(upstream / "torch", ignore_errors=True)
    assert ended.stdout.startswith("fixed: "), ended.stdout + ended.stderr
    assert ended.returncode == 0
