# SPDX-License-Identifier: Apache-2.0
"""The page of options, from the dataclass that declares them and from the signature of Lightning's strategy."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle, parse
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zero3 import Zero3Options

_BEGINNING = """\
# Options

<!-- Made by `python docs/generate.py` from lightning_zero3.Zero3Options and Lightning's DeepSpeedStrategy. -->

Arguments of `Zero3FastStrategy` and `Zero3FastFabricStrategy`, all by keyword but `config`, and of the recipes' command
lines. Where an argument and `config` say different things, or the config and the Trainer, you get an error that names
both; stock Lightning lets `config` win silently. A misspelt argument is an error that names the nearest one.

`"zero3_fast"` is the strategy with the defaults, `"zero3_fast_offload"` has `offload_optimizer=True`, and
`"zero3_stock"` has `lightning_zero3.STOCK`: every switch off, stock's semantics. LightningCLI takes the strategy by
name, or by class with these options in YAML.

## Of this package

"""

_OF_LIGHTNING = """
## Of Lightning's DeepSpeedStrategy

Passed on as they are, except `stage` and `zero_optimization`, which are fixed. Types, defaults and descriptions (their
first sentence) are those of Lightning 2.6.6 ([all of them][lightning]). A `–` is what it doesn't describe.

[lightning]: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.strategies.DeepSpeedStrategy.html

"""
# Fixed here, or described above.
_NOT_PASSED_ON = ("self", "stage", "zero_optimization")


def markdown() -> str:
    """The page."""
    documented = descriptions(Zero3Options)
    hints = get_type_hints(Zero3Options)
    own = [
        (
            "config",
            "dict, path or None",
            "None",
            "A DeepSpeed config, or a JSON file with one. It is copied, never changed. None: Lightning's.",
        )
    ]
    own += [
        (field.name, type_name(hints[field.name]), f"{field.default!r}", documented[field.name])
        for field in dataclasses.fields(Zero3Options)
    ]
    lightnings = descriptions(DeepSpeedStrategy.__init__)
    theirs = [
        (each.name, type_name(each.annotation), f"{each.default!r}", _first_sentence(lightnings.get(each.name, "–")))
        for each in inspect.signature(DeepSpeedStrategy.__init__).parameters.values()
        if each.name not in (*_NOT_PASSED_ON, "config")
    ]
    headings = ("option", "type", "default", "what it does")
    return (
        _BEGINNING
        + table(headings, ((code(n), code(t), code(d), w) for n, t, d, w in own))
        + _OF_LIGHTNING
        + table(headings, ((code(n), code(t), code(d), w) for n, t, d, w in theirs))
    )


def descriptions(documented: Any) -> Mapping[str, str]:
    """What a Google-style docstring says of each argument: in one line each, as Markdown."""
    parsed = parse(inspect.getdoc(documented) or "", DocstringStyle.GOOGLE)
    return {each.arg_name: one_line(each.description or "") for each in parsed.params}


def one_line(text: str) -> str:
    """A docstring's text as Markdown within a table's cell."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text)
    text = re.sub(r"`([^`]*?) ?<(http\S*)>`_", r"[\1](\2)", text)
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def type_name(hint: Any) -> str:
    """A type as it is written in a signature, whichever way it was written."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(type_name(each) for each in get_args(hint))
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    if hint is NoneType:
        return "None"
    name = hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return name.removeprefix("typing.").replace("typing.", "")


def code(text: str) -> str:
    """As code within a table's cell."""
    return f"`{text}`".replace("|", "\\|")


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    headings = tuple(headings)
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.]) (?=[A-Z])", text)[0]
