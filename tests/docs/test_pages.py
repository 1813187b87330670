# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code are up to date, and pages find each other."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import lightning_zero3.cli
from lightning_zero3 import precision
from lightning_zero3.capabilities.fixes import UPSTREAM_FIXES
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"
# A fix → the page of its fault.
FAULTS = {
    "accumulate_backwards": "several_backwards",
    "align_swapped_gradients": "swapped_gradient_unread",
    "alias_master_weights": "dead_alias_comparison",
    "batch_optimizer_step": "optimizer_walks_all_groups",
    "bucket_per_process_group": "bucket_flushed_between_groups",
    "coalesce_grad_norms": "norm_per_sub_group",
    "coalesce_persistent_gather": "gather_per_persistent_parameter",
    "keep_edits": "gathered_edit_lost",
    "keep_partial_gradients": "partial_gradients_not_saved",
    "lean_hooks": "idle_fetch",
    "lean_linear": "signature_per_call",
    "lower_the_scale": "grad_scaler_never_falls",
    "move_exactly": "offload_states_frozen",
    "refuse_unfrozen": "unfrozen_never_trains",
    "scoped_grad_clear": "clears_per_sub_group",
    "skip_invalid_norm": "invalid_norm_applied",
    "skip_redundant_release": "release_walks_three_times",
    "zero_missing_gradients": "unused_parameter_moves",
}


def loaded(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def generated(monkeypatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(DOCS))
    return loaded("generate").pages()


def test_pages_made_from_the_code_are_up_to_date(generated):
    for name, text in generated.items():
        assert (DOCS / name).read_text() == text, f"{name}: run `python docs/generate.py`"


def test_the_table_is_found_within_the_page_that_is_written_by_hand(generated):
    assert precision.markdown() in generated["precision.md"]


def test_every_option_and_command_has_its_row(generated):
    from dataclasses import fields

    for field in fields(lightning_zero3.Zero3Options):
        assert f"\n| `{field.name}` | " in generated["options.md"], field.name
    for name in lightning_zero3.cli.COMMANDS:
        assert f"\n## lightning-zero3 {name}\n" in generated["commands.md"]
    for text in (generated["options.md"], generated["commands.md"]):
        assert " |  |" not in text, "something is undocumented"


def test_the_api_has_every_public_name():
    page = (DOCS / "api.rst").read_text()
    documented = set(re.findall(r"\.\. (?:auto\w+|data):: lightning_zero3\.(\w+)", page))
    assert documented == set(lightning_zero3.__all__) - {"__version__"}


@pytest.mark.parametrize("index", ["index", "upstream/README"])
def test_every_page_is_found(index):
    home = DOCS / f"{index}.md"
    linked = {(home.parent / link).resolve() for link in re.findall(r"\]\(([\w./-]+)\)", home.read_text())}
    for page in home.parent.glob("*.md"):
        assert page == home or page in linked, page.name


def test_what_mends_a_fault_is_there():
    named = re.findall(r"`([\w/]+\.py)`", (DOCS / "upstream" / "README.md").read_text())
    assert len(named) > 50
    assert [
        name
        for name in named
        if not any((ROOT / at / name).is_file() for at in ("lightning_zero3", ".", "docs/upstream"))
    ] == []


@pytest.mark.parametrize("fix", [fix.name for fix in UPSTREAM_FIXES])
def test_every_fix_has_the_page_of_its_fault(fix):
    page = DOCS / "upstream" / f"{FAULTS[fix]}.md"
    index = (DOCS / "upstream" / "README.md").read_text()
    (row,) = [line for line in index.splitlines() if f"]({page.name})" in line.split(" | ")[0]]
    rooms = re.findall(r"`([\w/]+\.py)`", row.rsplit(" | ", 2)[1])
    assert rooms, row
    for room in rooms:
        assert (ROOT / "lightning_zero3" / room).is_file(), room
