# SPDX-License-Identifier: Apache-2.0
"""Trying out a router of a model's own class: how Transformers computes what AutoEP computes in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

WIDTH = 4


def try_router(router_class: type[nn.Module], config: Any, question: Callable[[Any], bool], otherwise: str) -> bool:
    """Ask a small router of a class a question; the random state stays as it is.

    Args:
        router_class: Transformers' class of a router, made from the model's config.
        config: That config; it is copied, with a hidden size of :data:`WIDTH`.
        question: Given the router, says yes or no.
        otherwise: What a router that can't be tried means, for a warning. The answer is no then.
    """
    small = copy.copy(config)
    small.hidden_size = WIDTH
    try:
        # On the host, whatever the default device: on the meta device there would be nothing to see.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            return question(router_class(small))
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        rank_zero_warn(f"{router_class.__name__} can't be tried out ({error}), so {otherwise}")
        return False
