"""Reading a single consolidated file into a partitioned model.

Source: Lightning's ``DeepSpeedStrategy._restore_zero_state`` (2.6.6), which it replaces: that one writes weights
without their masters, so that one step later they are back at their initialisation; gives buffers to rank 0 only; and
drops the list of missing and unexpected keys. Expires when Lightning's does all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


def load_consolidated(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load a whole state dict into a module whose parameters are partitioned, one submodule's parameters at a time.

    Every rank reads the same file. ``nn.Module.load_state_dict`` does the reading on each of them, so buffers, extra
    state and hooks of the module's own are treated as in any other load; each submodule's parameters are gathered while
    it reads its own. Masters take the file's values in their own precision, where the file has more than the weights
    can hold.

    Args:
        module: The LightningModule.
        state_dict: Names as in ``module.state_dict()``, tensors of whole parameters.
        strict: Whether missing and unexpected names are an error.

    Raises:
        RuntimeError: As ``load_state_dict``: names that don't match, with ``strict``; shapes that don't match, always.
    """
    import deepspeed

    open_contexts: dict[int, tuple[ExitStack, list[tuple[nn.Parameter, Any]]]] = {}
    gathered: set[nn.Parameter] = set()

    def gather(submodule: nn.Module, states: Mapping[str, Any], prefix: str, *_: Any) -> None:
        own = {name: p for name, p in submodule._parameters.items() if p is not None and p not in gathered}
        context = ExitStack()
        context.enter_context(deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0))
        gathered.update(own.values())
        open_contexts[id(submodule)] = context, [(p, states.get(prefix + name)) for name, p in own.items()]

    def write_back(submodule: nn.Module, _: Any) -> None:
        context, values = open_contexts.pop(id(submodule))
        loaded = [(p, v) for p, v in values if torch.is_tensor(v) and _was_loaded(p, v)]
        gathered.difference_update(p for p, _ in values)
        context.close()
        for parameter, value in loaded:
            _refine_master(parameter, value)

    with ExitStack() as hooks:
        for submodule in module.modules():
            before = submodule.register_load_state_dict_pre_hook(gather)  # type: ignore[no-untyped-call]
            after = submodule.register_load_state_dict_post_hook(write_back)  # type: ignore[no-untyped-call]
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        module.load_state_dict(state_dict, strict=strict)


def _was_loaded(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Whether a gathered parameter holds a value of the file, rounded to its own dtype and otherwise as it is."""
    return value.shape == parameter.shape and torch.equal(parameter.data, value.to(parameter.data))


def _refine_master(parameter: Any, value: torch.Tensor) -> None:
    from lightning_zero3.optimizer.edits import KeepEdits

    optimizer = getattr(parameter, "_z3_optimizer", None)
    if isinstance(optimizer, KeepEdits) and optimizer.is_optimized(parameter) and value.dtype != parameter.dtype:
        optimizer.set_full_hp_param(value, parameter)  # type: ignore[attr-defined]
