"""``DeepSpeedZeRoOffload`` with leaner hooks. Importing this module imports DeepSpeed.

Upstream symbols: ``DeepSpeedZeRoOffload._register_deepspeed_module``, the hooks that it registers and the modules'
``pre_bwd_fn`` and ``post_bwd_fn``; ``pre_sub_module_forward_function`` and its three siblings; ``FWD_MODULE_STACK``;
``fetch_sub_module``, ``release_sub_module`` and what they call in ``PartitionedParameterCoordinator`` (0.19.7, 0.19.8).
What is left out:

- ``setup_context`` of the two autograd functions: for it torch inspects the signature of ``forward`` at every call.
- For modules that hold no parameters: release, which finds nothing, and the autograd function before it. Fetch stays,
  because it prefetches for the modules that follow.
- Wrappers for NVTX ranges, for Dynamo and for ``no_grad`` around functions that are called in ``no_grad`` anyway, and
  lines for a log that nobody reads. The functions inside are upstream's own (:func:`_rebound`).

Under Dynamo all is upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.utils import z3_leaf_module

from lightning_zero3.capabilities.probing import unwrapped

_COORDINATOR = "_PartitionedParameterCoordinator__"
_ACTIVE = f"{_COORDINATOR}active_backward_submodules"
_CACHED = f"{_COORDINATOR}params_to_release"
_REBOUND = (
    "fetch_sub_module",
    "_fetch_sub_module_impl",
    "release_sub_module",
    f"{_COORDINATOR}all_gather_params",
    f"{_COORDINATOR}release_param",
)
_Upstream = parameter_offload.DeepSpeedZeRoOffload


def _parameters_of(module: Any, recurse: bool = False) -> Iterable[Any]:
    """As upstream's ``iter_params``, without a walk where only the module's own are asked for."""
    if recurse:
        found: Iterable[Any] = partitioned_param_coordinator.iter_params(module, recurse=True)
        return found
    # dict's own method: DeepSpeed's registries fetch parameters when they are indexed.
    own = [parameter for parameter in dict.values(module._parameters) if parameter is not None]
    return [*own, *module._external_params.values()] if module._external_params else own


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a log's line."""


_HELPERS = {"iter_params": _parameters_of, "print_rank_0": _nothing, "see_memory_usage": _nothing}
_GLOBALS: dict[int, dict[str, Any]] = {}


def _rebound(function: Callable[..., Any]) -> FunctionType:
    """Upstream's own function, out of its wrappers and with leaner helpers.

    Args:
        function: A method of an upstream class.
    """
    plain = unwrapped(function)
    names = _GLOBALS.setdefault(id(plain.__globals__), {**plain.__globals__, **_HELPERS})
    result = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    result.__kwdefaults__ = plain.__kwdefaults__
    return result


def _unless_compiled(lean: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is upstream's where Dynamo traces it."""

    def call(*arguments: Any, **named: Any) -> Any:
        return (upstream if torch.compiler.is_compiling() else lean)(*arguments, **named)

    return call


class LeanOffload(parameter_offload.DeepSpeedZeRoOffload):  # type: ignore[misc]
    """Upstream's class, with hooks that cost less."""

    # Whether any parameter is frozen: then what is gathered while a checkpoint is recomputed is released by the module
    # whose backward is under way, whether that has parameters or not.
    _any_frozen = True
    _before_forward = _rebound(_Upstream.pre_sub_module_forward_function)
    _after_forward = _rebound(_Upstream.post_sub_module_forward_function)
    _before_backward = _rebound(_Upstream.pre_sub_module_backward_function)
    _after_backward = _rebound(_Upstream.post_sub_module_backward_function)

    def setup_zero_stage3_hooks(self) -> None:
        """As upstream's, which registers all hooks."""
        coordinator = self.param_coordinator
        for name in _REBOUND:
            lean = MethodType(_rebound(getattr(type(coordinator), name)), coordinator)
            setattr(coordinator, name, _unless_compiled(lean, getattr(coordinator, name)))
        super().setup_zero_stage3_hooks()

    def _register_deepspeed_module(self, module: Any, *count: Any, **named: Any) -> None:
        known = "pre_bwd_fn" in module.__dict__
        super()._register_deepspeed_module(module, *count, **named)
        if not known:
            module.pre_bwd_fn = _applied(_Before, self, module, module.pre_bwd_fn)
            module.post_bwd_fn = _applied(_After, self, module, module.post_bwd_fn)
        # Its own, after those of the modules in it.
        for handle in (*self.forward_hooks[-2:], *self.backward_hooks[-2:]):
            hooks = handle.hooks_dict_ref()
            hook = hooks[handle.id]
            hooks[handle.id] = _unless_compiled(unwrapped(hook), hook)

    def pre_sub_module_forward_function(self, sub_module: Any) -> None:
        """As upstream's: gather what a module needs, and what the next ones will.

        Args:
            sub_module: A module whose forward is about to run.
        """
        if sub_module is self.module:
            self._any_frozen = not all(parameter.requires_grad for parameter in sub_module.parameters())
        with torch.no_grad():
            self._before_forward(sub_module)

    def post_sub_module_forward_function(self, sub_module: Any) -> None:
        """As upstream's: release what is no longer needed.

        Args:
            sub_module: A module whose forward has run.
        """
        if not _holds_nothing(sub_module):
            with torch.no_grad():
                self._after_forward(sub_module)

    def pre_sub_module_backward_function(self, sub_module: Any) -> None:
        """As upstream's: gather what a module's backward needs, and what the next ones will.

        Args:
            sub_module: A module whose backward is about to run.
        """
        with torch.no_grad():
            self._before_backward(sub_module)
            if self.releases_nothing(sub_module):
                getattr(self.param_coordinator, _ACTIVE).pop(sub_module.ds_id, None)

    def post_sub_module_backward_function(self, sub_module: Any) -> None:
        """As upstream's: release what a module's backward has used.

        Args:
            sub_module: A module whose backward has run.
        """
        with torch.no_grad():
            self._after_backward(sub_module)

    def releases_nothing(self, module: Any) -> bool:
        """Whether a module's backward leaves nothing to release."""
        return not self._any_frozen and _holds_nothing(module)


def _holds_nothing(module: Any) -> bool:
    """Whether a module has no parameters of its own, none of others that it was seen to use, and is no leaf."""
    return not (module._parameters or module._external_params or z3_leaf_module(module))


class _Before(torch.autograd.Function):
    """Upstream's ``PreBackwardFunctionForModule``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, offload: LeanOffload, module: Any) -> torch.Tensor:
        state = module.__dict__
        # Some models run a layer several times before they go backward.
        state["applied_pre_backward_ref_cnt"] = state.get("applied_pre_backward_ref_cnt", 0) + 1
        ctx.offload, ctx.module = offload, module
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state = ctx.module.__dict__
        if state["applied_pre_backward_ref_cnt"] > 0:
            ctx.offload.pre_sub_module_backward_function(ctx.module)
            state["applied_pre_backward_ref_cnt"] -= 1
        return (*gradients, None, None)


class _After(torch.autograd.Function):
    """Upstream's ``PostBackwardFunctionModule``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, offload: LeanOffload, module: Any) -> torch.Tensor:
        if value.requires_grad:
            module.__dict__["ds_grads_remaining"] += 1
        ctx.offload, ctx.module = offload, module
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state = ctx.module.__dict__
        state["ds_grads_remaining"] -= 1
        if state["ds_grads_remaining"] == 0:
            ctx.offload.post_sub_module_backward_function(ctx.module)
        return (*gradients, None, None)


def _applied(function: type[torch.autograd.Function], offload: LeanOffload, module: Any, upstream: Any) -> type:
    """What upstream's hooks call ``apply`` of, with one tensor; a class, which copies of modules share."""

    def apply(value: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return upstream.apply(value)
        if function is _After and offload.releases_nothing(module):
            return value
        return function.apply(value, offload, module)

    return type(function.__name__, (), {"apply": staticmethod(apply)})
