# SPDX-License-Identifier: Apache-2.0
"""Calls of an autograd function without what torch's ``apply`` does around it.

Upstream symbols: ``torch.autograd.Function.apply``, which looks at each call for a ``setup_context``, for transforms of
``torch.func`` and for their leftovers among all arguments, and ``BackwardCFunction.apply``, which looks at each node
for ``vjp`` (torch 2.8 to 2.13). Ours have neither. Detected by tests that count calls; where a name is missing torch's
own ``apply`` is used. Expires when torch's ``apply`` looks once per class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)


def refuse_transforms() -> None:
    """Refuse what neither DeepSpeed's functions nor ours can take part in.

    Weights that are gathered under a transform of ``torch.func`` are that transform's afterwards, and reading them ends
    the process.

    Raises:
        RuntimeError: A transform is around this call.
    """
    if _transformed():
        raise RuntimeError(
            "A transform of torch.func (grad, vmap, jvp, jacrev, ...) is around a module whose weights ZeRO-3 has "
            "partitioned. They can't be gathered under a transform, and DeepSpeed's functions can't be transformed. "
            "Put the transform around a module that isn't part of the trained one, or train without ZeRO-3."
        )


def called_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` of a function of our own whose first argument alone is a tensor that can come out of a transform.

    Args:
        function: A class with ``forward(ctx, ...)`` and ``backward``; its nodes get the latter as their ``apply``.

    Returns:
        What to call. It raises as :func:`refuse_transforms` does.
    """
    whole = function.apply
    alive = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)
    node = getattr(function, "_backward_cls", None)
    direct = getattr(super(torch.autograd.Function, function), "apply", None)
    if _transformed is bool or alive is None or direct is None:
        return whole
    if node is not None:
        node.apply = function.backward

    def call(value: torch.Tensor, *others: Any) -> Any:
        refuse_transforms()
        return direct(alive(value), *others)

    return call
