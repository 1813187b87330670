"""The tutorial's commands are commands: each is read by the parser that a user's would be."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_zero3 import cli
from lightning_zero3.metrics.profile_regions import OF_THE_OPTIMIZER
from tests.recipes.recipes import RECIPES

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def commands(page: Path) -> list[list[str]]:
    """The commands in a page's code blocks: lines that begin with ``$``, with those that they go on in."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("$ ")]


def test_every_command_of_the_tutorial_can_be_read(monkeypatch):
    called: list[tuple[str, dict[str, Any]]] = []

    def recorded(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def command(**named: Any) -> int:
            called.append((name, named))
            return 0

        return command

    for name, place in cli.COMMANDS.items():
        module, function = place.split(":")
        imported = importlib.import_module(module)
        monkeypatch.setattr(imported, function, recorded(name, getattr(imported, function)))
    found = commands(TUTORIAL)
    profiled = []
    for program, *arguments in found:
        if program == "lightning-zero3":
            assert cli.main(arguments) == 0, arguments
        else:
            assert program == "python"
            recipe, *options = arguments
            assert (ROOT / recipe).is_file()
            settings = RECIPES[Path(recipe).stem].RECIPE.parse(options)
            profiled += [settings.profiled_steps] if settings.profile else []
    assert {name for name, _ in called} == {"plan", "compare"}
    assert len(profiled) >= 3
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
