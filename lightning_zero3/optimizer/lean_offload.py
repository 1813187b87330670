# SPDX-License-Identifier: Apache-2.0
"""``DeepSpeedZeRoOffload`` with leaner hooks. Importing this module imports DeepSpeed.

Upstream symbols: ``DeepSpeedZeRoOffload._register_deepspeed_module``, the hooks that it registers and the modules'
``pre_bwd_fn`` and ``post_bwd_fn``; ``pre_sub_module_forward_function`` and its three siblings; ``FWD_MODULE_STACK``
(0.19.7, 0.19.8). What is left out:

- ``setup_context`` of the two autograd functions: for it torch inspects the signature of ``forward`` at every call.
- Two of the four hooks: each of the others does the work of two.
- The autograd functions around tensors that need no gradient, and walks through what is one tensor.
- For modules that hold no parameters: release, which finds nothing, and the autograd function before it. Fetch stays,
  because it prefetches for the modules that follow.
- Wrappers for NVTX ranges, for Dynamo and for ``no_grad`` around functions that are called in ``no_grad`` anyway, and
  lines for a log that nobody reads. The functions inside are upstream's own (``rebound.py``).
- Fetch and release that have nothing to do (``lean_coordinator.py``).

Under Dynamo all is upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.utils import apply_to_tensors_only

from lightning_zero3.capabilities.backward import LEFT_ON_MODULES
from lightning_zero3.capabilities.probing import unwrapped
from lightning_zero3.optimizer.autograd_calls import called_directly, refuse_transforms
from lightning_zero3.optimizer.lean_coordinator import LeanCoordinator
from lightning_zero3.optimizer.rebound import is_leaf, rebound

_Upstream = parameter_offload.DeepSpeedZeRoOffload
_COUNT = "applied_pre_backward_ref_cnt"


class LeanOffload(parameter_offload.DeepSpeedZeRoOffload):  # type: ignore[misc]
    """Upstream's class, with hooks that cost less."""

    # Whether any parameter is frozen: then what is gathered while a checkpoint is recomputed is released by the module
    # whose backward is under way, whether that has parameters or not.
    _any_frozen = True
    _parameters: tuple[Any, ...] = ()
    _before_forward = rebound(_Upstream.pre_sub_module_forward_function)
    _after_forward = rebound(_Upstream.post_sub_module_forward_function)
    _before_backward = rebound(_Upstream.pre_sub_module_backward_function)
    _after_backward = rebound(_Upstream.post_sub_module_backward_function)

    def setup_zero_stage3_hooks(self) -> None:
        """As upstream's, which registers all hooks."""
        self._lean = LeanCoordinator(self.param_coordinator)
        super().setup_zero_stage3_hooks()

    def get_param_coordinator(self) -> Any:
        """As upstream's; its leaner view, except under Dynamo."""
        return self.param_coordinator if torch.compiler.is_compiling() else self._lean

    def _register_deepspeed_module(self, module: Any, *count: Any, **named: Any) -> None:
        if module is self.module:
            self._parameters = tuple(module.parameters())
            self._registered: set[int] = set()
        known = id(module) in self._registered
        if not known:
            self._registered.add(id(module))
            # Upstream keeps those of an earlier engine, whose coordinator would be asked.
            for name in LEFT_ON_MODULES:
                module.__dict__.pop(name, None)
        super()._register_deepspeed_module(module, *count, **named)
        if not known:
            module.pre_bwd_fn = _applied(_before, self, module, module.pre_bwd_fn)
            module.post_bwd_fn = _applied(_after, self, module, module.post_bwd_fn)
        # Its own, after those of the modules in it: each pair lies together, so the first one can stand for both.
        before, after = self.forward_hooks[-2:]
        gathered, released = self.backward_hooks[-2:]
        pre, post = before.hooks_dict_ref(), after.hooks_dict_ref()
        pre[before.id] = _before_call(self, pre[before.id], pre.pop(released.id))
        post[after.id] = _after_call(self, post[after.id], post.pop(gathered.id))

    def pre_sub_module_forward_function(self, sub_module: Any) -> None:
        """As upstream's: gather what a module needs, and what the next ones will.

        Args:
            sub_module: A module whose forward is about to run.
        """
        if sub_module is self.module:
            self._any_frozen = not all(parameter.requires_grad for parameter in self._parameters)
        if self._lean.passes(sub_module, forward=True):
            parameter_offload.FWD_MODULE_STACK.append(sub_module)
            return
        with torch.no_grad():
            self._before_forward(sub_module)

    def post_sub_module_forward_function(self, sub_module: Any) -> None:
        """As upstream's: release what is no longer needed.

        Args:
            sub_module: A module whose forward has run.
        """
        if not _holds_nothing(sub_module) and not self._lean.lets_go(sub_module, forward=True):
            with torch.no_grad():
                self._after_forward(sub_module)

    def pre_sub_module_backward_function(self, sub_module: Any) -> None:
        """As upstream's: gather what a module's backward needs, and what the next ones will.

        Args:
            sub_module: A module whose backward is about to run.
        """
        if not self._lean.passes(sub_module, forward=False):
            with torch.no_grad():
                self._before_backward(sub_module)
        # The root stays until the pass has ended, as with upstream.
        if sub_module is not self.module and self.releases_nothing(sub_module):
            self._lean.active.pop(sub_module.ds_id, None)

    def post_sub_module_backward_function(self, sub_module: Any) -> None:
        """As upstream's: release what a module's backward has used.

        Args:
            sub_module: A module whose backward has run.
        """
        if not self._lean.lets_go(sub_module, forward=False):
            with torch.no_grad():
                self._after_backward(sub_module)

    def releases_nothing(self, module: Any) -> bool:
        """Whether a module's backward leaves nothing to release."""
        return not self._any_frozen and _holds_nothing(module)


def _holds_nothing(module: Any) -> bool:
    """Whether a module has no parameters of its own, none of others that it was seen to use, and is no leaf."""
    return not (module._parameters or module._external_params or is_leaf(module))


def _before_call(offload: LeanOffload, gather: Any, mark: Any) -> Callable[..., Any]:
    """Upstream's two hooks before a forward in one: gather parameters, and mark inputs for the release in backward."""

    def before(module: Any, inputs: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            gather(module, inputs)
            return mark(module, inputs)
        refuse_transforms()
        offload.pre_sub_module_forward_function(module)
        module.__dict__["ds_grads_remaining"] = 0
        if offload.releases_nothing(module):
            return None
        marked = []
        for value in inputs:
            if type(value) is not torch.Tensor:
                marked.append(apply_to_tensors_only(module.post_bwd_fn.apply, value))
            elif value.requires_grad:
                marked.append(_after(value, offload, module))
            else:
                marked.append(value)
        return tuple(marked)

    return before


def _after_call(offload: LeanOffload, release: Any, mark: Any) -> Callable[..., Any]:
    """Upstream's two hooks after a forward in one: release parameters, and mark outputs for the gather in backward."""
    release_any, mark_any = unwrapped(release), unwrapped(mark)
    stack = parameter_offload.FWD_MODULE_STACK

    def after(module: Any, inputs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            release(module, inputs, output)
            return mark(module, inputs, output)
        if type(output) is not torch.Tensor or hasattr(output, "ds_id") or hasattr(output, "ds_param_alias"):
            release_any(module, inputs, output)
            return mark_any(module, inputs, output)
        stack.pop()
        offload.post_sub_module_forward_function(module)
        if output.requires_grad:
            return _before(output, offload, module)
        state = module.__dict__
        state[_COUNT] = state.get(_COUNT, 0) + 1
        return None

    return after


class _Before(torch.autograd.Function):
    """Upstream's ``PreBackwardFunctionForModule``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, offload: LeanOffload, module: Any) -> torch.Tensor:
        state = module.__dict__
        # Some models run a layer several times before they go backward.
        state[_COUNT] = state.get(_COUNT, 0) + 1
        ctx.offload, ctx.module = offload, module
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state = ctx.module.__dict__
        if state[_COUNT] > 0:
            ctx.offload.pre_sub_module_backward_function(ctx.module)
            state[_COUNT] -= 1
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


_before, _after = called_directly(_Before), called_directly(_After)


def _applied(function: Callable[..., Any], offload: LeanOffload, module: Any, upstream: Any) -> type:
    """What upstream's hooks call ``apply`` of, with one tensor; a class, which copies of modules share."""

    def apply(value: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return upstream.apply(value)
        if function is _after and offload.releases_nothing(module):
            return value
        return function(value, offload, module)

    return type(upstream.__name__, (), {"apply": staticmethod(apply)})
