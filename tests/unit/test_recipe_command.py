# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 recipe``: what is listed, copied and started. Runs of the installed one: tests/release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_zero3 import recipe_command
from lightning_zero3.cli import main
from lightning_zero3.recipe_files import recipe_names
from shared.settings import Settings

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
START = "import sys; sys.argv[0] = 'lightning-zero3'; from lightning_zero3.cli import main; status = main(); {then}"


def test_they_are_listed_without_torch():
    then = "print('torch' in sys.modules); sys.exit(status)"
    command = [sys.executable, "-c", START.format(then=then), "recipe", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed, torch_is_there = done.stdout.splitlines()
    found = json.loads(listed)
    assert found["folder"] == str(RECIPES)
    assert list(found["recipes"]) == recipe_names()
    for name, about in found["recipes"].items():
        assert Path(about["path"]) == RECIPES / f"{name}.py"
        assert about["summary"].endswith(".")
        assert f"{name}_tiny.yaml" in about["configs"]
    # Each file of configs/ is one recipe's.
    configs = [config for about in found["recipes"].values() for config in about["configs"]]
    assert sorted(configs) == sorted(path.name for path in (RECIPES / "configs").iterdir())
    assert torch_is_there == "False"


def test_the_list_says_what_to_type(capsys):
    assert main(["recipe"]) == 0
    said = capsys.readouterr().out
    for part in (*recipe_names(), "glm45air_4x8.yaml", "lightning-zero3 recipe glm45air --help", str(RECIPES)):
        assert part in said


@pytest.mark.parametrize("arguments", [["glm45air", "--path"], ["--path", "glm45air"]])
def test_where_a_recipe_lies(arguments, capsys):
    assert main(["recipe", *arguments]) == 0
    assert capsys.readouterr().out == f"{RECIPES / 'glm45air.py'}\n"
    assert main(["recipe", "--path"]) == 0
    assert capsys.readouterr().out == f"{RECIPES}\n"


def names(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts and "runs" not in path.parts}


def test_a_copy_has_what_the_recipe_needs_and_no_other_recipe(tmp_path, capsys):
    assert main(["recipe", "qwen35", "--copy", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one' / 'qwen35.py'}\n"
    copied, there = names(tmp_path / "one"), names(RECIPES)
    others = {name for name in there if "glm45air" in name or "minimax_m3" in name}
    assert len(others) >= 6
    assert copied == there - others
    # Files that are there stay as they are.
    (tmp_path / "one" / "qwen35.py").write_text("mine")
    assert main(["recipe", "glm45air", "--copy", str(tmp_path / "one")]) == 2
    assert "isn't an empty folder" in capsys.readouterr().err
    assert (tmp_path / "one" / "qwen35.py").read_text() == "mine"


def test_a_copy_of_all(tmp_path):
    (tmp_path / "all").mkdir()
    assert main(["recipe", f"--copy={tmp_path / 'all'}"]) == 0
    assert names(tmp_path / "all") == names(RECIPES)
    assert os.access(tmp_path / "all" / "launch" / "torchrun.sh", os.X_OK)


class Started(Exception):
    """In place of another program in this process."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that this process would have become."""
    commands: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == command[0]
        commands.append(command)
        raise Started

    monkeypatch.setattr(os, "execv", execv)
    return commands


@pytest.mark.parametrize("options", [[], ["--help"], ["--config", "a.yaml", "--max_steps=3", "--benchmark"], ["more"]])
def test_all_that_follows_a_name_is_the_recipes(options, started):
    with pytest.raises(Started):
        main(["recipe", "glm45air", *options])
    assert started == [[sys.executable, str(RECIPES / "glm45air.py"), *options]]


def test_no_recipe_has_an_option_that_the_command_takes():
    own = {field.name for field in fields(Settings)} & {name.lstrip("-") for name in recipe_command._OWN}
    assert own == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["glm45"], "Did you mean glm45air?"),
        (["glm45", "--max_steps", "3"], "Did you mean glm45air?"),
        (["x", "--path"], "There's no recipe 'x'."),
        (["glm45air", "--path", "--copy", "mine"], "one of the two"),
        (["--max_steps", "3", "glm45air"], "--max_steps"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said, started, capsys):
    assert main(["recipe", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert started == []
