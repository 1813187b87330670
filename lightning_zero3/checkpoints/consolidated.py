# SPDX-License-Identifier: Apache-2.0
"""Reading a single consolidated file into a partitioned model.

Source: Lightning's ``DeepSpeedStrategy._restore_zero_state`` (2.6.6), which it replaces: that one writes weights
without their masters, so that one step later they are back at their initialisation; gives buffers to rank 0 only; and
drops the list of missing and unexpected keys. Expires when Lightning's does all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as ours:
        for submodule in module.modules():
            ours.enter_context(_gathering(submodule))
        module.load_state_dict(state_dict, strict=strict)


@contextmanager
def _gathering(submodule: Any) -> Iterator[None]:
    """A submodule that gathers its own parameters while it loads them."""
    import deepspeed

    load = submodule._load_from_state_dict
    of_its_own = submodule.__dict__.get("_load_from_state_dict")

    def gather_and_load(state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = {name: p for name, p in submodule._parameters.items() if p is not None}
        with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0):
            load(state_dict, prefix, *args, **kwargs)
            values = {p: state_dict.get(prefix + name) for name, p in own.items()}
            loaded = {p: value for p, value in values.items() if torch.is_tensor(value) and _was_loaded(p, value)}
        for parameter, value in loaded.items():
            _refine_master(parameter, value)

    submodule._load_from_state_dict = gather_and_load
    try:
        yield
    finally:
        del submodule._load_from_state_dict
        if of_its_own is not None:
            submodule._load_from_state_dict = of_its_own


def _was_loaded(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Whether a gathered parameter holds a value of the file, rounded to its own dtype and otherwise as it is."""
    return value.shape == parameter.shape and torch.equal(parameter.data, value.to(parameter.data))


def _refine_master(parameter: Any, value: torch.Tensor) -> None:
    from lightning_zero3.optimizer.edits import KeepEdits

    optimizer = getattr(parameter, "_z3_optimizer", None)
    if isinstance(optimizer, KeepEdits) and optimizer.is_optimized(parameter) and value.dtype != parameter.dtype:
        optimizer.set_full_hp_param(value, parameter)
