# SPDX-License-Identifier: Apache-2.0
"""The command: which recipes there are, where they lie, a copy of one to own, and starting one."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_zero3.config import SetupError
from lightning_zero3.recipe_files import copy_recipe, described, recipe_file, recipe_names, recipes_directory

# No recipe has an option of these names.
_OWN = frozenset({"--path", "--copy", "--json"})


def recipe(name: str | None = None, path: bool = False, copy: str | None = None, json: bool = False) -> int:
    """List the recipes, or run one: ``lightning-zero3 recipe NAME``, then any options of the recipe itself.

    ``lightning-zero3 recipe NAME --help`` lists those. A run's output is below the working directory.

    Args:
        name: A recipe; None for all of them.
        path: Print where the recipe's file lies, for torchrun and srun; without a name, the folder of all.
        copy: A folder that gets the recipe with its configs, launch files and what recipes share; without a name, all
            recipes.
        json: List as one JSON object.

    Returns:
        0; a run has the recipe's own exit status.

    Raises:
        SetupError: There is no such recipe, or the folder for the copy is in use.
    """
    if path and copy is not None:
        raise SetupError("--path says where the recipes lie, --copy copies them: one of the two.")
    if path:
        print(recipes_directory() if name is None else recipe_file(name))
    elif copy is not None:
        print(copy_recipe(name, copy))
    elif json or name is None:
        found: dict[str, Any] = {
            "folder": str(recipes_directory()),
            "recipes": {each: described(each) for each in ([name] if name else recipe_names())},
        }
        if json:
            print(json_format.dumps(found))
        else:
            _show(found)
    else:
        run(name, [])
    return 0


def is_a_run(arguments: Sequence[str]) -> bool:
    """Whether a recipe is to be run, so that what follows its name is for the recipe to read.

    Args:
        arguments: What follows ``lightning-zero3 recipe``.

    >>> is_a_run(["glm45air", "--help"]), is_a_run(["glm45air", "--copy=mine"]), is_a_run(["--help"])
    (True, False, False)
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    return named and not any(argument.partition("=")[0] in _OWN for argument in arguments)


def run(name: str, options: Sequence[str]) -> NoReturn:
    """Become the recipe's process.

    Not a child: signals, exit status and a launcher's variables are the recipe's own, and Lightning starts further
    ranks by the path of the script that runs.

    Args:
        name: See :func:`lightning_zero3.recipe_files.recipe_file`.
        options: The recipe's.

    Raises:
        SetupError: There is no such recipe.
    """
    command = [sys.executable, str(recipe_file(name)), *options]
    sys.stdout.flush()
    os.execv(command[0], command)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "")
    table.add_column("configs/", no_wrap=True, overflow="fold")
    for name, about in found["recipes"].items():
        table.add_row(name, about["summary"], "\n".join(about["configs"]))
    out = Console(soft_wrap=False)
    out.print(table)
    name = next(iter(found["recipes"]))
    for what, command in (
        ("Run one", f"lightning-zero3 recipe {name} [its options]"),
        ("Its options", f"lightning-zero3 recipe {name} --help"),
        ("Under a launcher", f"torchrun ... $(lightning-zero3 recipe {name} --path) [its options]"),
        ("A copy to change", f"lightning-zero3 recipe {name} --copy FOLDER"),
        ("All files", found["folder"]),
    ):
        print(f"{what + ':':<18}{command}")
