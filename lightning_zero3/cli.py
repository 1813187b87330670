# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 COMMAND``: finds the command; each command's options and work are in a file of its own."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from typing import get_args, get_type_hints

from lightning_zero3 import __version__, recipe_command
from lightning_zero3.config import SetupError

# Command → module:function. A function's signature and docstring are its options and help; it returns the exit status.
COMMANDS = {
    "compare": "lightning_zero3.compare.command:compare",
    "doctor": "lightning_zero3.doctor.command:doctor",
    "export": "lightning_zero3.export_command:export",
    "plan": "lightning_zero3.plan.command:plan",
    "recipe": "lightning_zero3.recipe_command:recipe",
}

# What may be given without its option's name, in this order.
POSITIONS = {"compare": ("a", "b"), "export": ("checkpoint", "out"), "recipe": ("name",)}
# The parser has a `--config` of its own.
SHORTER = {"export": {"config": "model_config"}}
_BOOLS = frozenset({"true", "false", "yes", "no"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Of the command line, without the program's name; those of this process if None. ``--an-option`` and
            ``--an_option`` are the same.

    Returns:
        The exit status: a command's own, or 2 for input that can't be used.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[..., int]] = {}
    try:
        from jsonargparse import auto_cli

        # One command's imports must not stand in another's way: the doctor runs where the rest can't be imported.
        for name in [given[0]] if given and given[0] in COMMANDS else COMMANDS:
            module, function = COMMANDS[name].split(":")
            commands[name] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        print(f"lightning-zero3: {error}: pip install {error.name}", file=sys.stderr)
        return 2
    try:
        if given[:1] == ["recipe"] and recipe_command.is_a_run(given[1:]):
            recipe_command.run(given[1], given[2:])
        parsed = _as_parsed(given, commands)
        return int(auto_cli(commands, args=parsed, exit_on_error=False, version=__version__))
    except (SetupError, ArgumentError) as error:
        print(f"lightning-zero3: {_said(error)}", file=sys.stderr)
        return 2


def _as_parsed(given: Sequence[str], commands: Mapping[str, Callable[..., int]]) -> list[str]:
    """Arguments as the parser knows them: underscores in options' names, a value for each flag, lists as JSON.

    >>> def a_command(json: bool = False, an_option: int = 1) -> int: ...
    >>> _as_parsed(["a-command", "--json", "--an-option=8"], {"a-command": a_command})
    ['a-command', '--json=true', '--an_option=8']
    >>> def compare(a: list[str], b: list[str], json: bool = False) -> int: ...
    >>> _as_parsed(["compare", "--json", "one", "two", "--b", "three", "four"], {"compare": compare})
    ['compare', '--json=true', '--a=["one"]', '--b=["two", "three", "four"]']
    >>> def export(checkpoint: str, out: str, json: bool = False) -> int: ...
    >>> _as_parsed(["export", "one", "two", "--json"], {"export": export})
    ['export', '--checkpoint=one', '--out=two', '--json=true']
    """
    command = commands.get(given[0]) if given else None
    hints = get_type_hints(command) if command is not None else {}
    places = iter(POSITIONS.get(given[0], ()) if given else ())
    lists: dict[str, list[str]] = {}
    parsed = list(given[:1])
    left = list(given[1:])
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            place = next(places, None)
            if place is None:
                parsed.append(name + equals + value)
            elif list[str] not in (hints.get(place), *get_args(hints.get(place))):
                parsed.append(f"--{place}={name}{equals}{value}")
            else:
                lists.setdefault(place, []).append(name + equals + value)
            continue
        name = name[2:].replace("-", "_")
        name = SHORTER.get(given[0], {}).get(name, name)
        kinds = (hints.get(name), *get_args(hints.get(name)))
        if list[str] in kinds:
            values = [value] if equals else list(itertools.takewhile(lambda each: not each.startswith("--"), left))
            left = left if equals else left[len(values) :]
            lists.setdefault(name, []).extend(values)
        elif not equals and bool in kinds and not (left and left[0].lower() in _BOOLS):
            parsed.append(f"--{name}=true")
        else:
            own = [] if equals or not left or left[0].startswith("--") else [left.pop(0)]
            parsed += [f"--{name}{equals}{value}", *own]
    return parsed + [f"--{name}={json.dumps(values)}" for name, values in lists.items()]


def _said(error: BaseException) -> str:
    r"""What is wrong, on one line; the parser's errors in this package's words.

    >>> _said(ArgumentError(None, 'Parser key "nodes":\n  Expected a <class \'int\'>. Got value: x'))
    "--nodes 'x': int is expected."
    """
    text = " ".join(str(error).split())
    option = re.match(r'Parser key "(\w+)"', text)
    seen = re.search(r"(?:Got|Given) value: (.*)", text)
    if not isinstance(error, ArgumentError) or option is None or seen is None:
        return text
    kinds = re.findall(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\])", text)
    wanted = [kind or f"one of {choices}" for kind, choices in dict.fromkeys(kinds) if kind != "NoneType"]
    return f"--{option[1]} {seen[1]!r}: {' or '.join(wanted) or 'another kind of value'} is expected."


if __name__ == "__main__":
    sys.exit(main())
