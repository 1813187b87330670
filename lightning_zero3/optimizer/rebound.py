# SPDX-License-Identifier: Apache-2.0
"""Upstream's own functions, out of their wrappers and with leaner helpers. Importing this module imports DeepSpeed.

Upstream symbols: ``iter_params``, ``z3_leaf_module``, ``print_rank_0`` and ``see_memory_usage``, which the functions
that fetch, release and reduce call thousands of times in a micro-step, and the wrappers around these functions: NVTX
ranges, ``no_grad`` and Dynamo's (0.19.7, 0.19.8). What a function does stays upstream's; a test compares each of its
effects. Detected by ``capabilities.LEAN_HOOKS``. Expires with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.utils import z3_leaf_module
from torch import nn

from lightning_zero3.capabilities.probing import unwrapped


def own_parameters(module: Any, recurse: bool = False) -> Iterable[Any]:
    """As upstream's ``iter_params``, without a walk where only the module's own are asked for.

    Args:
        module: A module of an engine.
        recurse: Whether those of the modules in it are asked for too.
    """
    if recurse:
        found: Iterable[Any] = partitioned_param_coordinator.iter_params(module, recurse=True)
        return found
    # dict's own method: DeepSpeed's registries fetch parameters when they are indexed.
    own = [parameter for parameter in dict.values(module._parameters) if parameter is not None]
    return [*own, *module._external_params.values()] if module._external_params else own


def is_leaf(module: Any) -> bool:
    """As upstream's ``z3_leaf_module``, which lets torch compose the message of an error for each module that is none.

    Args:
        module: A module of an engine.
    """
    if "_z3_leaf" in module.__dict__ or type(module).__getattr__ is not nn.Module.__getattr__:
        return bool(z3_leaf_module(module))
    return bool(getattr(type(module), "_z3_leaf", False))


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a log's line."""


_HELPERS = {
    "iter_params": own_parameters,
    "z3_leaf_module": is_leaf,
    "print_rank_0": _nothing,
    "see_memory_usage": _nothing,
}
_GLOBALS: dict[int, dict[str, Any]] = {}


def rebound(function: Callable[..., Any], **helpers: Any) -> FunctionType:
    """Upstream's own function, out of its wrappers and with leaner helpers.

    Args:
        function: A function of an upstream module or class.
        **helpers: More names of its module, and what stands for them.
    """
    plain = unwrapped(function)
    if helpers:
        names = {**plain.__globals__, **_HELPERS, **helpers}
    else:
        names = _GLOBALS.setdefault(id(plain.__globals__), {**plain.__globals__, **_HELPERS})
    result = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    result.__kwdefaults__ = plain.__kwdefaults__
    return result
