# SPDX-License-Identifier: Apache-2.0
"""The combinations table: up to date, and no row without evidence."""

import ast
import re
from pathlib import Path

import pytest

from lightning_zero3.capabilities import grid
from lightning_zero3.capabilities.combinations import COMBINATIONS, Combination

ROOT = Path(__file__).parents[3]


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


def test_no_cell_claims_a_test_that_does_not_run_it() -> None:
    from tests.distributed import test_grid

    run = _parameters(test_grid.test_a_cell_trains_as_plain_transformers_do)
    refused = _parameters(test_grid.test_a_refused_cell_says_so_before_any_process_group)
    for cell in grid.cells():
        status = grid.status_of(cell)
        if status.kind == "untested":
            assert status.reason
            assert not status.evidence
            continue
        path, name, parameter = re.fullmatch(r"(.*)::(.*)\[(.*)\]", status.evidence).groups()  # type: ignore[union-attr]
        assert (ROOT / path).samefile(test_grid.__file__)
        assert hasattr(test_grid, name)
        assert (run if status.kind == "tested" else refused)[parameter] == cell
        # Refused cells aren't trained, and what is trained isn't refused.
        assert (cell.name in grid.passed()) == (status.kind == "tested")
    assert run.keys() >= grid.passed()


def _parameters(test: object) -> dict[str, grid.Cell]:
    """What pytest runs a test with: its parameters by their ids."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    return {value.id: value.values[0] for value in mark.args[1]}


def test_the_grid_is_the_whole_product() -> None:
    names = [cell.name for cell in grid.cells()]
    assert len(set(names)) == len(names) == 2 * 2 * 4 * 4 * 3 * 2 * 2
