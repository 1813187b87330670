# SPDX-License-Identifier: Apache-2.0
"""From a command line and YAML files to settings: defaults by size, nearest names for misspelt options."""

from __future__ import annotations

import difflib
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser

from lightning_zero3.config import SetupError, Zero3Options
from shared.settings import Settings

_HELPERS = ("config", "print_config", "help")


def parse_settings(sizes: Mapping[str, Settings], arguments: Sequence[str], *, description: str) -> Settings:
    """Read a command line.

    The size is looked for first, since the other options' defaults are those of the size, in ``--help`` and
    ``--print_config`` too.

    Args:
        sizes: Defaults of each size; the first one is taken where none is asked for.
        arguments: Without the program's name. Later ones overrule earlier ones, those in ``--config`` files included.
        description: For ``--help``.

    Raises:
        SetupError: An option is unknown, or its value is impossible.
        SystemExit: ``--help`` or ``--print_config`` was asked for.
    """
    size = next(iter(sizes))
    for name, value in _given(arguments):
        _refuse_unknown(name)
        size = value if name == "size" else size
    if size not in sizes:
        raise SetupError(f"--size {size}: one of {', '.join(sizes)}.")
    parser = ArgumentParser(description=description, exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options.")
    strategy, all_ = ({field.name for field in fields(kind)} for kind in (Zero3Options, Settings))
    for others in (strategy, all_ - strategy):  # what a run does first, then how the strategy does it
        parser.add_class_arguments(Settings, as_group=False, skip=others)
    for action in parser._actions:  # docstrings are written for Python and its documentation
        if action.help is not None:
            action.help = action.help.replace("``None``", "null").replace("``", "")
    parser.set_defaults(asdict(sizes[size]))
    try:
        parsed = parser.parse_args(list(_with_values(arguments)))
        given = {name: getattr(parsed, name) for name in all_}
        return Settings(**{**given, "output": Path(given["output"])})
    except (ArgumentError, TypeError, ValueError) as error:
        raise SetupError(str(error)) from error


def _with_values(arguments: Sequence[str]) -> Iterator[str]:
    """The same, with ``--benchmark`` for ``--benchmark=true`` and ``--resume`` for ``--resume=auto``."""
    switches = {f"--{field.name}": "true" for field in fields(Settings) if field.type in (bool, "bool")}
    switches["--resume"] = "auto"
    for at, argument in enumerate(arguments):
        last = at + 1 == len(arguments) or arguments[at + 1].startswith("--")
        yield f"{argument}={switches[argument]}" if argument in switches and last else argument


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Names and values of the options that are given, those in config files where the file is named."""
    for at, argument in enumerate(arguments):
        if not argument.startswith("--"):
            if argument.startswith("-") and argument != "-h" and not _is_number(argument):
                raise SetupError(f"{argument}: options begin with two dashes.")
            continue
        name, equals, value = argument[2:].partition("=")
        following: Iterable[str] = arguments[at + 1 : at + 2]
        value = value if equals else next(iter(following), "")
        yield name, value
        if name == "config":
            yield from _in_file(value)


def _in_file(path: str) -> Iterator[tuple[str, Any]]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"--config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SetupError(f"--config {path} isn't YAML: {error}") from error
    if not isinstance(content, dict):
        raise SetupError(f"--config {path}: a YAML file of options and their values, such as 'size: full'.")
    for name, value in content.items():
        yield str(name), value


def _refuse_unknown(name: str) -> None:
    known = [*(field.name for field in fields(Settings)), *_HELPERS]
    if name not in known:
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        hint = f"Did you mean --{near[0]}? " if near else ""
        raise SetupError(f"There's no option --{name}. {hint}All options: --help.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
