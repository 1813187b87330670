# SPDX-License-Identifier: Apache-2.0
"""Where the recipes are, and one of them by its name.

They stand beside the package in a clone, and in ``lightning_zero3/recipes/`` in a wheel. Either way they are files to
run and to copy, not a package: what they share is found beside them, under the name ``shared``, which stays theirs.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import shutil
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


def recipe_file(name: str) -> Path:
    """The script of a recipe.

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
    return recipes_directory() / f"{name}.py"


def described(name: str) -> dict[str, Any]:
    """What a recipe's files say of it, without importing anything.

    Args:
        name: See :func:`recipe_file`.

    Returns:
        ``path``, ``summary`` (its docstring's first line) and ``configs`` (names of files in ``configs/``).

    Raises:
        SetupError: There is no such recipe.
    """
    path = recipe_file(name)
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return {
        "path": str(path),
        "summary": docstring.partition("\n")[0],
        "configs": [config.name for config in _configs(name)],
    }


def copy_recipe(name: str | None, target: str | Path) -> Path:
    """Copy recipes out, to be changed: a recipe, its configs, the launch files, and what recipes share.

    Args:
        name: See :func:`recipe_file`; None for all recipes.
        target: A folder that isn't there yet, or is empty.

    Returns:
        The recipe's script in the copy; the folder where all were copied.

    Raises:
        SetupError: There is no such recipe, or the folder holds something or can't be written.
    """
    folder, target = recipes_directory(), Path(target)
    script = None if name is None else recipe_file(name)
    keep = None if name is None else {script, *_configs(name)}

    def left_out(directory: str, entries: list[str]) -> set[str]:
        unwanted = {"__pycache__", "runs"}
        if keep is not None and Path(directory) in (folder, folder / "configs"):
            unwanted |= {each for each in entries if (path := Path(directory, each)).is_file() and path not in keep}
        return unwanted

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SetupError(f"{target} is there already, and isn't an empty folder: copy the recipe to another one.")
    try:
        shutil.copytree(folder, target, ignore=left_out, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise SetupError(f"The recipe can't be copied to {target}: {error}") from error
    return target if script is None else target / script.name


def _configs(name: str) -> list[Path]:
    return sorted((recipes_directory() / "configs").glob(f"{name}_*.yaml"))


@cache
def load_recipe(name: str) -> ModuleType:
    """A recipe's module, with ``MODEL_CLASS``, ``SETTINGS``, ``full_config``, ``tiny_config`` and ``RECIPE``.

    Args:
        name: See :func:`recipe_file`.

    Raises:
        SetupError: There is no such recipe.
    """
    path = recipe_file(name)
    specification = importlib.util.spec_from_file_location(f"lightning_zero3.recipes.{name}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with _shared_found_in(path.parent):
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
