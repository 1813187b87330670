# SPDX-License-Identifier: Apache-2.0
"""What a recipe is: a name, a model class, and for each of its sizes a config and settings; and its command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_zero3.config import SetupError
from shared import attention
from shared.command_line import parse_settings
from shared.settings import Settings

# What a run imports beside the strategy's own dependencies.
_PACKAGES = ("matplotlib", "tensorboard")


@dataclass(frozen=True)
class Recipe:
    """One architecture, at its true size and scaled down.

    Args:
        name: What tables and charts are called.
        model_class: The Hugging Face class.
        settings: Defaults of each size.
        configs: For each size, its config; the function takes a number of layers, or None for all.
    """

    name: str
    model_class: type[Any]
    settings: Mapping[str, Settings]
    configs: Mapping[str, Callable[[int | None], Any]]

    def parse(self, arguments: Sequence[str]) -> Settings:
        """The settings that a command line asks for.

        Args:
            arguments: Without the program's name; ``["--config", "FILE.yaml"]`` for a file alone.

        Raises:
            SetupError: An option is unknown, or its value is impossible.
        """
        return parse_settings(self.settings, arguments, description=f"Train {self.name} with lightning_zero3.")

    def config(self, settings: Settings) -> Any:
        """The model's config under these settings.

        Args:
            settings: As :meth:`parse` returns them.

        Raises:
            SetupError: The model has fewer layers than are asked for.
        """
        make = self.configs[settings.size]
        whole = make(None).num_hidden_layers
        if settings.layers is not None and settings.layers > whole:
            raise SetupError(f"--layers {settings.layers}: {self.name} ({settings.size}) has {whole}.")
        config = make(settings.layers)
        attention.choose(config, settings.attention)
        return config

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run from the command line.

        Args:
            arguments: Those of this process if None.
        """
        from shared.lost_peer import LostPeerError

        try:
            settings = self.parse(sys.argv[1:] if arguments is None else arguments)
            _check_packages()
            if settings.ab is None:
                from shared.run import train

                train(self, settings)
            else:
                from shared.ab import train_both  # and with it what only a comparison needs

                train_both(self, settings)
        except (SetupError, LostPeerError) as error:
            # What a person has to change, without the way that the program took to find out.
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            sys.exit(getattr(error, "exit_status", 1))


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise SetupError(f"Recipes need {' and '.join(missing)}: pip install 'lightning_zero3[recipes]'")
