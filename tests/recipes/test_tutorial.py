# SPDX-License-Identifier: Apache-2.0
"""The tutorial: what it goes by, what its tables hold, and the profile that it shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from lightning_zero3.metrics.profile_regions import OF_THE_OPTIMIZER
from tests.docs.blocks import blocks_of
from tests.docs.commands import commands
from tests.recipes.recipes import RECIPES

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def test_it_goes_by_plan_profile_and_comparison():
    """That its commands can be read is tests/docs' business."""
    found = [command for block in blocks_of("docs/tutorial.md") for command in commands(block)]
    assert {command[1] for command in found if command[0] == "lightning-zero3"} == {"plan", "compare"}
    assert sum("--profile" in command for command in found) >= 3
    text = TUTORIAL.read_text()
    for word in ("--ab", "compare.md", "plan-memory.md", "aliasing.md"):
        assert word in text


def profiled(output: str) -> str:
    """A recipe's run with a profile, on this rank: what was printed."""
    from shared.run import train

    recipe = RECIPES["glm45air"].RECIPE
    sizes = ["--devices", "1", "--sequence_length", "32", "--micro_batch_size", "1", "--max_tokens", "20000"]
    options = ["--max_steps", "3", "--profile", "2-3", "--profile_memory", "--output", output]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(recipe, recipe.parse([*sizes, *options]))
    return printed.getvalue()


def test_a_recipes_profile_is_in_its_runs_folder(ranks, tmp_path):
    printed = ranks(1).run(profiled, str(tmp_path))[0]
    folder = tmp_path / "version_0" / "profile"
    found = {path.name for path in folder.iterdir()}
    assert found == {"profile.json", "profile.md", "rank_0.steps_2_to_3.pt.trace.json.gz"}
    assert json.loads((folder / "profile.json").read_text())["steps"] == [2, 3]
    assert "Memory of steps 2 to 3" in printed
    assert str(folder) in printed


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_tutorial_is_found(page):
    assert "tutorial.md" in (ROOT / page).read_text()


def test_its_tables_have_only_phases_that_there_are():
    known = {*OF_THE_OPTIMIZER.values(), "whole step", "forward", "backward", "gradient reduction", "engine step"}
    known.add("optimizer call")
    rows = re.findall(
        r"^ *([a-z][a-z' -]*[a-z]) +[\d,.]+ +[\d,.]+ +no device ", TUTORIAL.read_text(), flags=re.MULTILINE
    )
    assert len(rows) > 10
    assert set(rows) <= known
