"""Where the recipes are, and one of them by its name.

They stand beside the package in a clone, and in ``lightning_zero3/recipes/`` in a wheel. Either way they are files to
run and to copy, not a package: what they share is found beside them, under the name ``shared``, which stays theirs.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_zero3.config import SetupError

_SHARED = "shared"


def recipes_directory() -> Path:
    """The folder with ``NAME.py``, ``shared/`` and ``configs/``.

    Raises:
        SetupError: There is none beside this installation.
    """
    package = Path(__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / _SHARED / "recipe.py").is_file():
            return folder
    raise SetupError(
        f"No recipes in {package / 'recipes'} or {package.parent / 'recipes'}: install lightning_zero3 from a wheel, "
        "or from a clone with pip install --editable."
    )


def recipe_names() -> list[str]:
    """Names that :func:`load_recipe` takes."""
    return sorted(path.stem for path in recipes_directory().glob("*.py"))


@cache
def load_recipe(name: str) -> ModuleType:
    """A recipe's module, with ``MODEL_CLASS``, ``SETTINGS``, ``full_config``, ``tiny_config`` and ``RECIPE``.

    Args:
        name: A recipe's file name without ``.py``.

    Raises:
        SetupError: There is no such recipe; the message lists those that there are.
    """
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise SetupError(
            f"There's no recipe {name!r}. {f'Did you mean {near[0]}? ' if near else ''}Recipes: {', '.join(names)}."
        )
    folder = recipes_directory()
    specification = importlib.util.spec_from_file_location(f"lightning_zero3.recipes.{name}", folder / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with _shared_found_in(folder):
        specification.loader.exec_module(module)
    return module


def recipe_settings(name: str, arguments: Sequence[str]) -> Any:
    """The settings that a recipe's command line asks for.

    Args:
        name: See :func:`load_recipe`.
        arguments: The recipe's own options; ``["--config", "FILE.yaml"]`` for a file, ``["--size", "full"]`` for the
            defaults of the true model.

    Returns:
        An object whose attributes are the options; ``load_recipe(name).RECIPE.config(settings)`` is its model's config.

    Raises:
        SetupError: There is no such recipe, or an option is unknown or impossible.
    """
    recipe = load_recipe(name)
    with _shared_found_in(recipes_directory()):
        return recipe.RECIPE.parse(arguments)


_LOADED: dict[str, ModuleType] = {}


@contextmanager
def _shared_found_in(folder: Path) -> Iterator[None]:
    """Let recipes import ``shared``, and leave a module of the same name that the caller has, or will have, alone."""
    there = _shared_modules()
    ours = all(str(folder) in str(getattr(module, "__file__", "")) for module in there.values())
    if there and ours:  # a recipe is running, or a test
        yield
        return
    for name in there:
        del sys.modules[name]
    sys.modules.update(_LOADED)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _LOADED.update(_shared_modules())
        for name in _LOADED:
            sys.modules.pop(name, None)
        sys.modules.update(there)


def _shared_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _SHARED}
