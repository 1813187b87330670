# SPDX-License-Identifier: Apache-2.0
"""Which packages are installed; asked of their metadata and of the import system, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Module → what is lost without it, for packages that the strategy itself does without.
_OPTIONAL = {
    "accelerate": "from_pretrained in configure_model",
    "matplotlib": "charts of recipes and plans",
    "tensorboard": "TensorBoard logs",
    "peft": "LoRA",
}


@dataclass(frozen=True)
class Package:
    """One package.

    Args:
        name: As pip knows it.
        version: Installed, or None.
        required: What this package asks for, e.g. ``>=2.5``; empty if any will do.
        needed_for: ``zero3_fast`` itself, or what is lost without it.
    """

    name: str
    version: str | None
    required: str
    needed_for: str

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"pip install '{self.name}{self.required}'"


def python() -> str:
    """The interpreter and the system."""
    return f"{platform.python_version()} ({platform.machine()}, {platform.platform()})"


def packages() -> list[Package]:
    """Every package that this one declares, and the optional ones."""
    found = [Package(name, _version(name), required, "zero3_fast") for name, required in _declared()]
    found += [Package(name, _version(name), "", lost) for name, lost in _OPTIONAL.items()]
    return found


def unsatisfied(package: Package) -> bool:
    """Whether a package is missing, or older than what is asked for.

    Args:
        package: One of :func:`packages`.
    """
    if package.version is None:
        return True
    if not package.required:
        return False
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # torch and Lightning bring it; without them there is more to say than this
        return False
    return not SpecifierSet(package.required).contains(package.version, prereleases=True)


def _declared() -> Iterator[tuple[str, str]]:
    """Names and versions of what this package's own metadata requires, without its extras."""
    try:
        requirements = importlib.metadata.requires("lightning_zero3") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that isn't installed
        requirements = ["torch", "lightning", "deepspeed", "transformers", "torchmetrics", "psutil"]
    for requirement in requirements:
        if "extra ==" not in requirement:
            match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*([^;]*)", requirement)
            assert match is not None
            yield match[1], match[2].strip()


def _version(name: str) -> str | None:
    module = name.replace("-", "_")
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(name)
    except (ImportError, ValueError):
        return None
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
