# SPDX-License-Identifier: Apache-2.0
"""The strategies' names in the registries of all of Lightning's packages, without importing one that nobody uses.

``lightning`` installs ``pytorch_lightning`` and ``lightning_fabric`` too, the same code with classes and registries of
its own. Importing them for users who don't would take seconds, and sorted imports put ours first. So where they aren't
imported yet, a finder on ``sys.meta_path`` waits for their registries; it answers for these two names alone, finds what
would be found without it, and is gone when both have been imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Where a registry is, and its name there → our module and class for it.
_OTHERS = {
    "pytorch_lightning.strategies": ("StrategyRegistry", "lightning_zero3.pytorch_lightning", "Zero3FastStrategy"),
    "lightning_fabric.strategies": (
        "STRATEGY_REGISTRY",
        "lightning_zero3.lightning_fabric",
        "Zero3FastFabricStrategy",
    ),
}


def register_in_other_packages() -> None:
    """Register in ``pytorch_lightning`` and ``lightning_fabric``: at once where imported, else when they are."""
    waits = _WaitsForRegistries()
    for home in _OTHERS:
        if home in sys.modules:
            _register(sys.modules[home])
        else:
            waits.homes.add(home)
    if waits.homes:
        sys.meta_path.insert(0, waits)


def _register(home: ModuleType) -> None:
    registry, module, name = _OTHERS[home.__name__]
    strategy = getattr(importlib.import_module(module), name, None)
    # None while a user imports our module first, which imports theirs: it registers at its end.
    if strategy is not None:
        strategy.register_strategies(getattr(home, registry))


class _WaitsForRegistries(MetaPathFinder):
    """Finds the modules with the registries as they are found anyway, and registers once they have run."""

    def __init__(self) -> None:
        self.homes: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A registry's module; nothing else is found here.

        Args:
            fullname: The module's name.
            path: Where its package lies.
            target: As Python's.
        """
        if fullname not in self.homes:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        self.homes.discard(fullname)
        if not self.homes:
            sys.meta_path.remove(self)
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        # Of this one module's loader.
        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
