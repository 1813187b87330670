# SPDX-License-Identifier: Apache-2.0
"""Where the Hugging Face models are inside a user's module, at any depth and under any attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_zero3.moe.adapters import is_wrapper

Found = list[tuple[str, nn.Module]]


def model_type(module: nn.Module) -> str:
    """``config.model_type`` of a Hugging Face model."""
    config: Any = module.config
    return str(config.model_type)


def is_model(module: nn.Module) -> bool:
    """Whether a module is a Hugging Face model; a LightningModule may carry the config of the one that it holds.

    PEFT's wrappers answer for the model inside them, and aren't one.
    """
    return not is_wrapper(module) and hasattr(module, "save_pretrained") and hasattr(module.config, "model_type")


def find_models(root: nn.Module, suits: Callable[[nn.Module], bool]) -> tuple[Found, Found]:
    """Find the outermost Hugging Face models of a kind.

    A composite model (text and vision) that doesn't suit is looked into: its text model may.

    Args:
        root: Any module, usually a LightningModule.
        suits: Whether a model is of the kind.

    Returns:
        Those that suit, and the outermost ones that don't, each with its dotted name.
    """
    found: Found = []
    others: Found = []
    for path, module in root.named_modules():
        if not is_model(module) or _inside(path, found):
            continue
        if suits(module):
            found.append((path, module))
        elif not _inside(path, others):
            others.append((path, module))
    looked_into = [other for other in others if any(_inside(path, [other]) for path, _ in found)]
    return found, [other for other in others if other not in looked_into]


def _inside(path: str, outer: Found) -> bool:
    return any(path.startswith(f"{name}.") or name == "" for name, _ in outer)
