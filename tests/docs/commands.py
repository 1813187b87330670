# SPDX-License-Identifier: Apache-2.0
"""Commands in blocks: their programs exist and know their options, as a user's own would be read."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_zero3 import cli, recipe_command
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.recipes.recipes import RECIPES

# Programs of others, whose options are theirs.
OF_OTHERS = {"pip", "source", "srun", "torchrun", "kubectl", "tensorboard", ".venv/bin/pre-commit"}


def commands(block: Block) -> list[list[str]]:
    """A block's commands, each as the words that a shell makes of it, without comments and variables before it."""
    text = block.source.replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines() if block.language == "bash" or line.startswith("$ ")]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        found += [words] if words else []
    return found


def check(command: list[str], page: str) -> None:
    """Fail for a command that couldn't be run as it stands. The current folder is the repository's.

    Args:
        command: Its words.
        page: The page that it stands in.
    """
    program, *arguments = command
    if program == "lightning-zero3":
        _check_ours(arguments)
    elif program == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
        for word in arguments:
            assert "=" in word or word in targets, f"make has no target {word}"
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        _check_tests(arguments[2:])
    elif program == "pytest":
        _check_tests(arguments)
    elif program == "python" and arguments[0] == "-c":
        ast.parse(arguments[1])
    elif program == "python":
        _check_script(arguments[0], arguments[1:], page)
    elif program in ("recipes/launch/torchrun.sh", "sbatch"):
        script, *arguments = arguments if program == "sbatch" else [program, *arguments]
        assert (ROOT / script).is_file(), script
        if arguments != ["..."]:
            _check_script(arguments[0], arguments[1:], page)
    else:
        assert program in OF_OTHERS, f"nothing is known of {program}"


def _check_ours(arguments: list[str]) -> None:
    if arguments[:1] == ["recipe"] and recipe_command.is_a_run(arguments[1:]):  # this process would become the recipe's
        if not any("$(" in word for word in arguments):
            _check_script(f"recipes/{arguments[1]}.py", arguments[2:], "")
        return
    called: list[str] = []

    def recorded(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def command(**named: Any) -> int:
            called.append(name)
            return 0

        return command

    with contextlib.ExitStack() as scope:
        for name, place in cli.COMMANDS.items():
            module, function = place.split(":")
            imported = importlib.import_module(module)
            scope.enter_context(mock.patch.object(imported, function, recorded(name, getattr(imported, function))))
        printed = scope.enter_context(contextlib.redirect_stderr(io.StringIO()))
        scope.enter_context(contextlib.redirect_stdout(printed))
        try:
            status = cli.main(arguments)
        except SystemExit as ended:  # --help
            status = ended.code
            called.append("help")
    assert status == 0, printed.getvalue()
    assert len(called) == 1


def _check_script(script: str, options: list[str], page: str) -> None:
    path = Path(script)
    if path.parent == Path("recipes"):
        assert path.stem in RECIPES, script
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):  # --help
            RECIPES[path.stem].RECIPE.parse(options)
        return
    written = [block.source for block in blocks_of(page) if block.source.startswith(f"# {script}\n")]
    source = written[0] if written else _source(ROOT / path)
    for option in options:
        if option.startswith("--"):
            name = option.partition("=")[0]
            known = (f'"{name}"', f'"{name[2:].replace("-", "_")}"')
            assert any(each in source for each in known), f"{script} has no option {name}"


def _source(script: Path) -> str:
    """A script's, and that of the modules beside it that it imports: some have their options there."""
    own = script.read_text()
    imported = re.findall(r"(?m)^(?:from|import) (\w+)", own)
    beside = [script.with_name(f"{name}.py") for name in imported]
    return own + "".join(path.read_text() for path in beside if path.is_file())


def _check_tests(arguments: list[str]) -> None:
    for word in arguments:
        if word.startswith("tests/"):
            path, _, name = word.partition("::")
            assert (ROOT / path).exists(), path
            if name:
                parsed = ast.walk(ast.parse((ROOT / path).read_text()))
                assert name in {node.name for node in parsed if isinstance(node, ast.FunctionDef)}, word
