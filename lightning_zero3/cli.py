"""``lightning-zero3 COMMAND``: finds the command; each command's options and work are in a file of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from lightning_zero3.config import SetupError

# Command → module:function. A function's signature and docstring are its options and help; it returns the exit status.
COMMANDS = {
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Of the command line, without the program's name; those of this process if None. ``--an-option`` and
            ``--an_option`` are the same.

    Returns:
        The exit status: a command's own, or 2 for input that can't be used.
    """
    from jsonargparse import auto_cli

    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[..., int]] = {}
    for name, where in COMMANDS.items():
        module, function = where.split(":")
        commands[name] = getattr(importlib.import_module(module), function)
    try:
        return int(auto_cli(commands, args=[_with_underscores(argument) for argument in given]))
    except SetupError as error:
        print(f"lightning-zero3: {error}", file=sys.stderr)
        return 2


def _with_underscores(argument: str) -> str:
    """An option's name as the parser knows it; values stay as they are.

    >>> _with_underscores("--expert-parallel-size=8"), _with_underscores("a-b")
    ('--expert_parallel_size=8', 'a-b')
    """
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


if __name__ == "__main__":
    sys.exit(main())
