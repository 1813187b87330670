# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer comes in two packages of the same code, whose classes don't know each other.

``lightning.pytorch`` and ``pytorch_lightning`` (which ``lightning`` installs too). Whatever asks for one of Lightning's
classes by ``isinstance`` must ask for that of the package that the user has imported.
"""

from __future__ import annotations

import sys
from typing import Any

_TRAINERS = ("lightning.pytorch", "pytorch_lightning")


def package_of(thing: object) -> Any:
    """The package whose class something is an instance of.

    Args:
        thing: A Trainer, strategy, LightningModule or callback, perhaps of a user's own class.

    Returns:
        ``lightning.pytorch`` or ``pytorch_lightning``, the module.

    Raises:
        TypeError: It is of neither.

    >>> import lightning.pytorch
    >>> package_of(lightning.pytorch.LightningModule()).__name__
    'lightning.pytorch'
    """
    for kind in type(thing).__mro__:
        for name in _TRAINERS:
            if f"{kind.__module__}.".startswith(f"{name}."):
                return sys.modules[name]
    raise TypeError(f"{type(thing).__name__} is no class of {' or '.join(_TRAINERS)}.")
