# SPDX-License-Identifier: Apache-2.0
"""What users write against changes on purpose only."""

import re
from pathlib import Path

import lightning_zero3
from tests import public_surface

ROOT = Path(__file__).parents[2]


def test_the_public_surface_is_the_one_that_was_written_down() -> None:
    assert public_surface.text() == public_surface.SNAPSHOT.read_text(), (
        "Names, signatures or options have changed. If that is meant, say so in CHANGELOG.md and run "
        "`python -m tests.public_surface`."
    )


def visible(page: Path) -> str:
    """A page without what only its tests read."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def test_what_the_pages_import_is_in_it() -> None:
    shown = {f"lightning_zero3.{name}" for name in lightning_zero3.__all__} | {*public_surface.DOCUMENTED}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for module, names in re.findall(r"(?m)^from (lightning_zero3[\w.]*) import (\(?[\w, \n]+)", visible(page)):
            for name in re.findall(r"\w+", names.partition("\n")[0] if "(" not in names else names):
                assert f"{module}.{name}" in shown, (page.name, module, name)
