# SPDX-License-Identifier: Apache-2.0
"""The house as CONTRIBUTING.md and docs/design.md describe it: sizes of files, the layout, layers, opening lines."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_zero3"
LINES_AT_MOST = 400
# Rows of the layout, and the folder that names without a folder stand in.
LAYOUT = {"The way through the house": PACKAGE, "Recipes": ROOT / "recipes" / "shared", "Around the package": ROOT}
SECTIONS = {**LAYOUT, "Upstream internals": PACKAGE}


def sources() -> list[Path]:
    folders = ("lightning_zero3", "recipes", "benchmarks", "dashboards", "docs", "tests")
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


@cache
def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def named_in(section: str) -> Iterator[tuple[str, Path]]:
    """Files that the tables of a section of docs/design.md name: as they are written, and which file that is.

    A name without a folder is one in the folder of the name before it in its cell, or in the section's.
    """
    page = (ROOT / "docs" / "design.md").read_text()
    text = re.search(rf"(?ms)^## {section}$(.*?)(?=^## |\Z)", page)
    assert text, section
    for row in re.findall(r"(?m)^\| .*\|$", text[1]):
        here = SECTIONS[section]
        for written in re.findall(r"`([\w./]+\.py)`", row.split(" | ")[1]):
            found = (here / written).resolve()
            if not found.exists():
                found = (SECTIONS[section] / written).resolve()
            if not found.exists():
                found = (ROOT / written).resolve()
            here = found.parent
            yield written, found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_opens_with_what_it_is_for_and_has_400_lines_or_a_reason(path: Path) -> None:
    opening = docstring_of(path)
    assert opening, "its first line is to say what it is responsible for"
    lines = len(path.read_text().splitlines())
    assert lines <= LINES_AT_MOST or re.search(rf"Longer than {LINES_AT_MOST} lines because ", opening), lines


@pytest.mark.parametrize("section", SECTIONS)
def test_the_docs_name_only_files_that_there_are(section: str) -> None:
    named = list(named_in(section))
    assert named
    assert [written for written, path in named if not path.exists()] == []


def test_each_module_has_its_place_in_the_layout() -> None:
    named = {path for section in LAYOUT for _, path in named_in(section)}
    private = ("__init__.py", "__main__.py")
    there = {
        path
        for path in sources()
        if path.relative_to(ROOT).parts[0] in ("lightning_zero3", "recipes", "benchmarks", "dashboards")
        and path.name not in private
    }
    there |= set((ROOT / "docs").glob("*.py")) | {p for p in (ROOT / "tests").glob("*.py") if "test_" not in p.name}
    assert sorted(str(path.relative_to(ROOT)) for path in there - named) == []


def test_each_module_is_in_a_layer() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    inside = {name.removeprefix("lightning_zero3.") for layer in layers for name in layer.split(" | ")}
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert there - {"__init__", "__about__"} == inside


def test_each_picture_and_each_file_of_data_is_shown() -> None:
    pages = "".join(page.read_text() for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"))
    kept = [path for folder in ("images", "data") for path in (ROOT / "docs" / folder).iterdir()]
    assert [path.name for path in kept if path.name not in pages] == []


def test_what_replaces_a_name_of_upstreams_says_why_and_until_when() -> None:
    replacing = [path for path in PACKAGE.rglob("*.py") if "import substituted" in path.read_text()]
    assert replacing
    assert [path.name for path in replacing if not re.search(r"Upstream symbols?", path.read_text())] == []
    assert [path.name for path in replacing if "xpires" not in path.read_text()] == []
