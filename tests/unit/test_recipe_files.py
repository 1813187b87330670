# SPDX-License-Identifier: Apache-2.0
"""Recipes found by name, beside the package. Those inside it, in a wheel: tests/release."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero3.config import SetupError
from lightning_zero3.recipe_files import load_recipe, recipe_names, recipe_settings, recipes_directory

ROOT = Path(__file__).parents[2]


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
