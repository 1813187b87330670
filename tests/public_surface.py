# SPDX-License-Identifier: Apache-2.0
"""What users write against, as text: names, signatures, switches, commands and options.

``python -m tests.public_surface`` writes ``tests/unit/public_surface.txt``. A test holds the two equal, so that none of
it changes unnoticed.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "unit" / "public_surface.txt"
# Beside `lightning_zero3`'s own names: what the pages tell users to import.
DOCUMENTED = (
    "lightning_zero3.config.SetupError",
    "lightning_zero3.lightning_fabric.Zero3FastFabricStrategy",
    "lightning_zero3.moe.build.build_from_config",
    "lightning_zero3.moe.load.load_pretrained",
    "lightning_zero3.moe.presets.register_preset",
    "lightning_zero3.moe.tensor_parallel.ATTENTION",
    "lightning_zero3.moe.tensor_parallel.MLP",
    "lightning_zero3.moe.tensor_parallel.register_tensor_parallel",
    "lightning_zero3.pytorch_lightning.Zero3FastStrategy",
)


def _signature(function: Callable[..., Any]) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        named = " (by name)" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        value = parameter.default
        shown = value.__name__ if inspect.isfunction(value) else repr(value)
        default = "" if value is inspect.Parameter.empty else f" = {shown}"
        yield f"{stars}{parameter.name}{default}{named}"


def _own(kind: type[Any]) -> dict[str, Any]:
    """What a class has beyond the upstream classes that it is made of."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("lightning_zero3")]
    theirs = {name for base in kind.__mro__ if base not in ours for name in vars(base)}
    found = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    options = {each.name for each in fields(kind)} if is_dataclass(kind) else set()
    return {name: found[name] for name in sorted(found) if not name.startswith("_") and name not in theirs | options}


def _lines_of(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and issubclass(value, BaseException):
        yield f"{name}: {', '.join(base.__name__ for base in value.__mro__[1:-3])}"
    elif inspect.isclass(value):
        yield name
        own = any("__init__" in vars(base) for base in value.__mro__ if base.__module__.startswith("lightning_zero3"))
        yield from (f"    {parameter}" for parameter in (_signature(value) if own else ()))
        for attribute, what in _own(value).items():
            called = what.__func__ if isinstance(what, classmethod | staticmethod) else what
            what = f"({', '.join(_signature(called))})" if inspect.isfunction(called) else ""
            yield f"    .{attribute}{what}"
    elif callable(value):
        yield f"{name}({', '.join(_signature(value))})"
    else:
        yield name


def text() -> str:
    """The whole surface."""
    sys.path[:0] = [path for path in (str(ROOT / "recipes"),) if path not in sys.path]
    import lightning.fabric.strategies
    import lightning.pytorch.strategies

    import lightning_zero3
    from lightning_zero3 import cli
    from lightning_zero3.metrics.names import METRICS
    from shared.settings import Settings

    lines = ["# lightning_zero3"]
    for name in lightning_zero3.__all__:
        # The optimizer is made by the engine; its constructor is upstream's business.
        lines += [name] if name == "FastStage3Optimizer" else _lines_of(name, getattr(lightning_zero3, name))
    lines += ["", "# elsewhere"]
    for path in DOCUMENTED:
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        # Those of other packages are the same class.
        lines += [path] if name.startswith("Zero3Fast") else _lines_of(path, value)
    registries = lightning.pytorch.strategies.StrategyRegistry, lightning.fabric.strategies.STRATEGY_REGISTRY
    lines += ["", "# strategies by name", *sorted({name for each in registries for name in each if "zero3" in name})]
    for command, where in sorted(cli.COMMANDS.items()):
        module, function = where.split(":")
        lines += ["", f"# lightning-zero3 {command}"]
        places = cli.POSITIONS.get(command, ())
        shorter = {long: short for short, long in cli.SHORTER.get(command, {}).items()}
        for line in _signature(getattr(importlib.import_module(module), function)):
            name, space, rest = line.removesuffix(" (by name)").partition(" ")
            lines.append(f"{'' if name in places else '--'}{shorter.get(name, name)}{space}{rest}")
    lines += [
        "",
        "# options of recipes",
        *(f"--{name}: {_kind(hint)}" for name, hint in get_type_hints(Settings).items()),
    ]
    lines += ["", "# metrics", *sorted(f"{entry.name} [{entry.unit}]" for entry in METRICS)]
    return "\n".join(lines) + "\n"


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if isinstance(annotation, type):
        return "None" if annotation is type(None) else annotation.__name__
    return " | ".join(map(_kind, get_args(annotation)))


if __name__ == "__main__":
    SNAPSHOT.write_text(text())
