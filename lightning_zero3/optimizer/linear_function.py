# SPDX-License-Identifier: Apache-2.0
"""Linear layers without a look at a function's signature at every call. Importing this module imports DeepSpeed.

Upstream symbols: ``deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3``, which ``zero.Init`` leaves in the place
of ``torch.nn.functional.linear``, and ``ZeROOrderedDict.__getitem__`` (0.19.7, 0.19.8). The function has a
``setup_context``, for which torch inspects the signature of ``forward``, binds arguments and fills in defaults in each
call; its backward enters ``torch.autocast`` where there is none. Ours runs upstream's own arithmetic, forward and
backward. Only layers whose forward is ``torch.nn.Linear``'s own get it, on themselves, and lose it with their engine.
Detected by ``capabilities.LEAN_LINEAR``. Expires when torch caches signatures, or DeepSpeed's function needs none.

Where the function isn't in place, under Dynamo, for weights that aren't gathered, and for layers without a weight of
their own (parametrizations), all is torch's and upstream's.
"""

from __future__ import annotations

import contextlib
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.zero import linear
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_zero3.optimizer.autograd_calls import called_directly
from lightning_zero3.optimizer.rebound import rebound

_AVAILABLE = ZeroParamStatus.AVAILABLE
_TORCHS = torch.nn.Linear.forward
_Upstream = linear.LinearFunctionForZeroStage3
_NO_CONTEXT = contextlib.nullcontext()


def _autocast(device_type: str, enabled: bool, dtype: Any) -> Any:
    """``torch.autocast``, or nothing where it is off and is to be off."""
    if not enabled and not torch.is_autocast_enabled(device_type):
        return _NO_CONTEXT
    return torch.autocast(device_type=device_type, enabled=enabled, dtype=dtype)


class _Torch:
    """``torch``, with the ``autocast`` above."""

    autocast = staticmethod(_autocast)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Linear(torch.autograd.Function):
    """Upstream's function, with ``forward`` and ``setup_context`` in one."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        device_type = linear.get_accelerator().device_name()
        ctx._fwd_used_autocast = torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type) if ctx._fwd_used_autocast else None
        ctx.save_for_backward(input, weight, bias)
        result: torch.Tensor = _Upstream.forward(input, weight, bias)
        return result

    backward = staticmethod(
        rebound(_Upstream.backward, torch=_Torch(), get_accelerator=lambda: linear.get_accelerator())
    )


_linear = called_directly(_Linear)


def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """``torch.nn.Linear.forward``. Pickled, a bound one is its class's method of the same name.

    Args:
        self: The layer.
        input: As torch's.
    """
    if type(self).forward is not _TORCHS:
        # Somebody has replaced it since, for all layers or this one's class.
        replaced: torch.Tensor = type(self).forward(self, input)
        return replaced
    if torch.nn.functional.linear is linear.zero3_linear_wrap and not torch.compiler.is_compiling():
        # dict's own method: upstream's looks each time for what DeepCompile may have left.
        own = self._parameters
        weight, bias = dict.get(own, "weight"), dict.get(own, "bias")
        if (
            weight is not None
            and getattr(weight, "ds_status", None) is _AVAILABLE
            and (getattr(bias, "ds_status", None) is _AVAILABLE if bias is not None else "bias" in own)
        ):
            result: torch.Tensor = _linear(input, weight, bias)
            return result
    return torch.nn.Linear.forward(self, input)


def is_torchs(function: Any) -> bool:
    """Whether a ``torch.nn.Linear.forward`` is torch's, and not one that somebody had put there before.

    Args:
        function: The method. One that ``functools.wraps`` torch's says that it is of torch's module; its code doesn't.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == torch.nn.modules.linear.__file__


def make_lean(module: torch.nn.Module) -> bool:
    """Give a linear layer the leaner function; any other module stays as it is.

    Args:
        module: A module of an engine.

    Returns:
        Whether it has got it.
    """
    if type(module).forward is not _TORCHS or not is_torchs(_TORCHS) or "forward" in module.__dict__:
        return False
    module.forward = MethodType(forward, module)
    return True


def make_upstreams(module: torch.nn.Module) -> None:
    """Take the leaner function away from a layer, unless somebody else has replaced it.

    Args:
        module: A module that has got it.
    """
    if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
        del module.forward
