"""``lightning-zero3 COMMAND``: finds the command; each command's options and work are in a file of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from lightning_zero3.config import SetupError

# Command → module:function. A function's signature and docstring are its options and help; it returns the exit status.
COMMANDS = {
    "doctor": "lightning_zero3.doctor.command:doctor",
}


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
        return int(auto_cli(commands, args=[_with_underscores(argument) for argument in given]))
    except SetupError as error:
        print(f"lightning-zero3: {error}", file=sys.stderr)
        return 2


def _with_underscores(argument: str) -> str:
    """An option's name as the parser knows it, a flag with its value; values stay as they are.

    >>> _with_underscores("--json")
    '--json=true'
    >>> _with_underscores("--expert-parallel-size=8"), _with_underscores("a-b")
    ('--expert_parallel_size=8', 'a-b')
    """
    if not argument.startswith("--"):
        return argument
    if argument == "--json":  # the parser wants a value for each bool
        return "--json=true"
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


if __name__ == "__main__":
    sys.exit(main())
