"""The combinations table: up to date, and no row without evidence."""

import ast
from pathlib import Path

import pytest

from lightning_zero3.combinations import COMBINATIONS, Combination, markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: row.what)
def test_every_row_names_a_test_that_exists_or_says_untested(row: Combination) -> None:
    if row.status == "untested":
        assert not row.evidence
        return
    path, _, name = row.evidence.partition("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert name in functions


def test_the_page_is_made_from_the_code() -> None:
    assert (ROOT / "docs" / "combinations.md").read_text() == markdown(), "run `python docs/generate.py`"
