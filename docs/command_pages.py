# SPDX-License-Identifier: Apache-2.0
"""The page of commands: ``lightning-zero3`` by its functions, recipes by their settings."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any, get_type_hints

from docstring_parser import DocstringStyle, parse
from option_page import code, descriptions, one_line, table, type_name

from lightning_zero3 import Zero3Options, cli, recipe_files

_BEGINNING = """\
# Commands

<!-- Made by `python docs/generate.py` from the commands' signatures and docstrings. -->

`lightning-zero3 COMMAND --help` prints the same, `lightning-zero3 --version` the version. A flag may stand without
`true`, `--an-option` and `--an_option` are the same, and `--config FILE.yaml` reads options from a file (but for
`export`, where it is the model's). The exit status is 2 for input that can't be used.

"""

_RECIPES = """\
## Recipes

`python recipes/NAME.py`, each with its own defaults; `--help` prints those of the size that is asked for,
`--print_config` as YAML, and `--config FILE.yaml` reads them. All [options of the strategy](options.md) are options
here, too. What the recipes are: [recipes](recipes.md).

"""

_DIFFERENT = """
### Defaults

Where they differ between recipes or sizes. `--expert_parallel_size null` is the largest number that divides ranks and
experts.

"""


def markdown() -> str:
    """The page."""
    return _BEGINNING + "\n".join([*(_command(name) for name in sorted(cli.COMMANDS)), _recipes()])


def _command(name: str) -> str:
    module, function_name = cli.COMMANDS[name].split(":")
    function = getattr(import_module(module), function_name)
    said = parse(inspect.getdoc(function) or "", DocstringStyle.GOOGLE)
    documented, hints = descriptions(function), get_type_hints(function)
    shown_as = {own: shorter for shorter, own in cli.SHORTER.get(name, {}).items()}
    positions = cli.POSITIONS.get(name, ())
    text = [f"## lightning-zero3 {name}\n"]
    text += [f"{one_line(part)}\n" for part in (said.short_description, said.long_description) if part]
    if positions:
        text.append(f"Without their names, in this order: {', '.join(code(each) for each in positions)}.\n")
    rows = [
        (
            code("--" + shown_as.get(each.name, each.name).replace("_", "-")),
            code(type_name(hints[each.name])),
            "required" if each.default is each.empty else code(repr(each.default)),
            documented[each.name],
        )
        for each in inspect.signature(function).parameters.values()
    ]
    return "\n".join([*text, table(("option", "type", "default", "what it does"), rows)])


def _recipes() -> str:
    settings = {
        f"{name}, {size}": values
        for name in recipe_files.recipe_names()
        for size, values in recipe_files.load_recipe(name).RECIPE.settings.items()
    }
    kind: Any = type(next(iter(settings.values())))
    strategy = {field.name for field in fields(Zero3Options)}
    documented, hints = descriptions(kind), get_type_hints(kind)
    own = [field.name for field in fields(kind) if field.name not in strategy]
    same: list[tuple[str, ...]] = []
    different: list[tuple[str, ...]] = []
    for name in [field.name for field in fields(kind)]:
        values = [_shown(getattr(each, name)) for each in settings.values()]
        alike = len(set(values)) == 1
        if name in own:
            default = code(values[0]) if alike else "differs"
            same.append((code(f"--{name}"), code(type_name(hints[name])), default, documented[name]))
        if not alike:
            different.append((code(f"--{name}"), *(code(each) for each in values)))
    return (
        _RECIPES
        + table(("option", "type", "default", "what it does"), same)
        + _DIFFERENT
        + table(("option", *settings), different)
    )


def _shown(value: Any) -> str:
    """As YAML and a command line have it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
