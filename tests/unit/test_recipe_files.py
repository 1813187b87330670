"""Recipes found by name, beside the package or inside it, without claiming a name that others may want."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero3.config import SetupError
from lightning_zero3.recipe_files import load_recipe, recipe_names, recipe_settings, recipes_directory

ROOT = Path(__file__).parents[2]
SCRIPT = """
import shutil, sys, types
from pathlib import Path
mine = types.ModuleType("shared"); mine.__file__ = "/somewhere/else.py"
if {foreign}: sys.modules["shared"] = mine
before = list(sys.path)
from lightning_zero3 import recipe_files
assert recipe_files.recipes_directory() == Path({recipes!r}), recipe_files.recipes_directory()
for name in recipe_files.recipe_names():
    recipe = recipe_files.load_recipe(name)
    settings = recipe_files.recipe_settings(name, ["--size", "full", "--layers", "4"])
    assert recipe.RECIPE.config(settings).num_hidden_layers == 4
    assert sys.modules.get("shared") is (mine if {foreign} else None)
    assert not [module for module in sys.modules if module.startswith("shared.")]
assert sys.path == before
print("fine")
"""


def test_the_recipes_are_those_in_the_folder():
    assert recipes_directory() == ROOT / "recipes"
    assert recipe_names() == ["glm45air", "minimax_m3", "qwen35"]


@pytest.mark.parametrize("name", ["glm45air", "minimax_m3", "qwen35"])
def test_a_recipe_has_what_others_ask_it_for(name):
    module = load_recipe(name)
    assert set(module.SETTINGS) == {"tiny", "full"}
    assert module.full_config(4).num_hidden_layers == 4
    assert type(module.full_config()) is module.MODEL_CLASS.config_class
    assert recipe_settings(name, ["--size", "full"]) == module.SETTINGS["full"]
    assert load_recipe(name) is module


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(SetupError, match=r"'glm45'\. Did you mean glm45air.*glm45air, minimax_m3, qwen35"):
        load_recipe("glm45")
    with pytest.raises(SetupError, match=r"There's no recipe 'x'\. Recipes:"):
        recipe_settings("x", [])
    with pytest.raises(SetupError, match="Did you mean --max_steps"):
        recipe_settings("qwen35", ["--max_step", "1"])


@pytest.mark.parametrize(("wheel", "foreign"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_from_a_clone_and_from_a_wheel_no_name_is_claimed(tmp_path, foreign, wheel):
    home = ROOT
    if wheel:  # laid out as the wheel is
        home = tmp_path
        (tmp_path / "lightning_zero3").mkdir()
        for entry in (ROOT / "lightning_zero3").iterdir():
            (tmp_path / "lightning_zero3" / entry.name).symlink_to(entry)
        section = (ROOT / "pyproject.toml").read_text().partition("wheel.force-include]")[2]
        source, target = re.search(r'^"(\w+)" = "([\w/]+)"$', section, re.MULTILINE).groups()
        (tmp_path / target).symlink_to(ROOT / source)
        (tmp_path / "lightning_zero3" / "recipe_files.py").unlink()
        (tmp_path / "lightning_zero3" / "recipe_files.py").write_text(
            (ROOT / "lightning_zero3" / "recipe_files.py").read_text()
        )
    recipes = home / "lightning_zero3" / "recipes" if wheel else home / "recipes"
    script = SCRIPT.format(foreign=foreign, recipes=str(recipes))
    done = subprocess.run([sys.executable, "-c", script], cwd=home, capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
