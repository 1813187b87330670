# SPDX-License-Identifier: Apache-2.0
"""The end of an engine: everything that it holds is given back, and nothing of it reaches the next one.

DeepSpeed's ``destroy`` removes some hooks, and leaves the rest to Python's collector. That finds it in use, for ever:
a list and a cache at the level of DeepSpeed's modules hold the user's module and the engine's coordinator, and torch
hides what hooks of parameters hold. All three are seen to by :func:`free_with_its_module`. While the module lives, the
engine's own two hooks on it keep the engine, and each parameter keeps the optimizer (``_z3_optimizer``), with masters,
moments and gradients; so do schedulers and Trainers. So when a module gets its next engine, the last one's contents are
let go one by one (:func:`end`), and what still points to it points to a shell.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero3.capabilities.backward import LEFT_ON_MODULES

_NAME = "_zero3_fast_engine"
# On an engine that was ended, so that whoever still has it can be told.
_ENDED = "zero3_fast_ended"
# On a parameter: the hooks that it holds (:func:`_hold_hooks_visibly`).
_HELD = "_zero3_fast_hooks"
# Attributes of parameters that say what one engine wants of them.
_OF_AN_ENGINE = ("_z3_optimizer", "comm_dtype")
_HOLDS_THE_OPTIMIZER = ("optimizer", "basic_optimizer", "client_optimizer", "lr_scheduler", "client_lr_scheduler")
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


@dataclass(frozen=True)
class BuiltEngine:
    """The engine around a module, kept on the module.

    Args:
        engine: DeepSpeed's engine.
        config: What of its config decides about results in evaluation.
        experts: The model whose layers AutoEP has replaced, or None.
        split: The model whose layers AutoTP has split, or None.
    """

    engine: Any
    config: Mapping[str, Any]
    experts: Any
    split: Any


def remember(module: nn.Module, built: BuiltEngine) -> None:
    """Note a module's engine.

    Args:
        module: The root module that the engine was built around.
        built: Its engine.
    """
    vars(module)[_NAME] = built


def engine_of(module: nn.Module) -> BuiltEngine | None:
    """The last engine that was built around a module, alive or ended; None if there was none.

    Args:
        module: A root module.
    """
    return vars(module).get(_NAME)


def has_ended(engine: Any) -> bool:
    """Whether :func:`end` has been called for an engine.

    Args:
        engine: DeepSpeed's engine, or anything else.
    """
    return _ENDED in vars(engine)


def has_optimizer(engine: Any) -> bool:
    """Whether an engine is alive and can train.

    Args:
        engine: DeepSpeed's engine.
    """
    return not has_ended(engine) and hasattr(engine.optimizer, "fp16_groups")


def free_with_its_module(engine: Any) -> None:
    """Let Python's collector free an engine together with its module, once nobody else has either.

    Upstream symbols: ``parameter_offload.FWD_MODULE_STACK``, which gets each engine's module at set-up and never loses
    it, and ``PartitionedParameterCoordinator.__params_to_release``, under a ``functools.lru_cache`` of the class, which
    keeps each coordinator that has run a step, by it parameters, by these the optimizer (0.19.7, 0.19.8). Detected by
    tests of what is freed. Expires when the stack is emptied by ``destroy`` and the cache is the coordinator's own. A
    third reason is torch's, see :func:`_hold_hooks_visibly`.

    Args:
        engine: An engine that was just built.
    """
    from deepspeed.runtime.zero import parameter_offload

    stack, module = parameter_offload.FWD_MODULE_STACK, engine.module

    def forget(gone: Any) -> None:
        stack[:] = [each for each in stack if each is not gone]

    stack[:] = [weakref.proxy(each, forget) if each is module else each for each in stack]
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    coordinator = getattr(offload, "param_coordinator", None)
    name = f"_{type(coordinator).__name__}__params_to_release"
    for parameter in module.parameters():
        _hold_hooks_visibly(parameter)
    # `instrument_w_nvtx` sets no `__wrapped__`.
    method = getattr(type(coordinator), name, None)
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            own = functools.partial(cell.cell_contents.__wrapped__, coordinator)
            setattr(coordinator, name, functools.lru_cache(maxsize=None)(own))


def _hold_hooks_visibly(parameter: Any) -> None:
    """Let a parameter's hooks be held by its dictionary, where Python's collector sees them.

    Upstream symbol: ``Tensor._post_accumulate_grad_hooks`` (torch 2.13): a dict that C++ holds too, by a reference that
    isn't shown to the collector, so a hook that holds its own parameter keeps it, and whatever else it holds, for ever.
    All of DeepSpeed's do. Detected by tests of what is freed. Expires when torch shows that reference.
    """
    hooks = parameter._post_accumulate_grad_hooks or {}
    theirs = {key: hook for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith("deepspeed.")}
    for key, hook in theirs.items():
        vars(parameter).setdefault(_HELD, []).append(hook)
        hooks[key] = _by_weak_reference(hook)


def _by_weak_reference(hook: Any) -> Any:
    reference = weakref.ref(hook)

    def call(*arguments: Any) -> Any:
        held = reference()
        return None if held is None else held(*arguments)

    return call


def end(engine: Any) -> None:
    """Destroy an engine and give back what it holds; the module keeps its partitioned weights and its own hooks.

    Upstream symbols: ``DeepSpeedEngine.destroy``, ``module_forward_pre_hook``, ``module_forward_post_hook``,
    ``first_dataloader_check`` and the attributes of the Stage-3 optimizer (0.19.7, 0.19.8). Reason: see this module's
    text. Detected by tests that count the bytes of live tensors. Expires when ``destroy`` does it.

    Args:
        engine: DeepSpeed's engine. One that has ended already stays as it is.
    """
    if has_ended(engine):
        return
    module, optimizer = engine.module, engine.optimizer
    _release_gathered(module)
    engine.destroy()
    remove_engine_hooks(module)
    for parameter in module.parameters():
        parameter.grad = None
        # Which parameters stay gathered is the next engine's own choice.
        parameter.ds_persist = False
        for name in _OF_AN_ENGINE:
            vars(parameter).pop(name, None)
        if _HELD in vars(parameter):
            # AutoTP's belong to its layers.
            vars(parameter)[_HELD] = [hook for hook in vars(parameter)[_HELD] if not _is_an_engines(hook)]
    # The user's optimizer; a scheduler keeps it alive. Its moments are this engine's.
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = []
    if optimizer is not None:
        vars(optimizer).clear()
    # Not all of it: `__del__` destroys once more.
    vars(engine).update(dict.fromkeys(name for name in _HOLDS_THE_OPTIMIZER if name in vars(engine)))
    engine.param_names = {}
    vars(engine)[_ENDED] = True


def remove_engine_hooks(module: nn.Module) -> None:
    """Remove the hooks that DeepSpeed's engines, ours or others', have left on a module.

    Lightning empties all of a module's hooks before an evaluation, the user's own and Transformers' output recorders
    with them (``remove_module_hooks``, 2.6.6). Those of AutoEP's and AutoTP's layers belong to the layers, and stay.

    Args:
        module: A module that no engine is to use further.
    """
    for each in module.modules():
        for kind in _HOOKS:
            hooks = getattr(each, kind)
            for key in [key for key, hook in hooks.items() if _is_an_engines(hook)]:
                del hooks[key]
        for name in LEFT_ON_MODULES:
            vars(each).pop(name, None)
        if _is_an_engines(getattr(vars(each).get("forward"), "__func__", None)):
            del each.forward  # a linear layer's, of a set-up that has failed


def _is_an_engines(hook: Any) -> bool:
    home = str(getattr(hook, "__module__", ""))
    ours = home.startswith("lightning_zero3.optimizer.")
    return ours or (home.startswith("deepspeed.") and not home.startswith("deepspeed.module_inject"))


def _release_gathered(module: nn.Module) -> None:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter: Any
    for parameter in module.parameters():
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.AVAILABLE:
            # A pass that an exception has ended leaves its users behind.
            parameter.ds_active_sub_modules.clear()
            parameter.partition()


def forget_what_engines_leave(config: Mapping[str, Any]) -> None:
    """Undo what an earlier engine has switched on for the whole process.

    Upstream symbols: ``torch_autocast.TORCH_AUTOCAST_INITIALIZED``, which makes every later optimizer communicate in
    autocast's dtype, and ``groups._ZERO_PARAM_INTRA_PARALLEL_GROUP``, which gives every later engine's parameters a
    secondary partition (0.19.7, 0.19.8). Both are read while an engine, or ``zero.Init``, sets up. Expires when
    ``destroy`` resets them.

    Args:
        config: The DeepSpeed config of what is built next.
    """
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    group = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    size = config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if group is not None and torch.distributed.get_world_size(group) != size:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
