# SPDX-License-Identifier: Apache-2.0
"""Experts in a ``ModuleList`` or ``ModuleDict``: gathered and reduced together, whichever a rank's tokens choose.

ZeRO Stage 3 gathers a module's weights when it is called, by a collective. Where each rank calls the experts that its
own tokens have chosen, ranks enter different collectives, and the run hangs or dies. DeepSpeed's remedy is to mark the
module around the experts as a *leaf*: all weights below it are gathered when it is called, and all gradients below it
are reduced when its backward ends, zeros for the experts that this rank hasn't used.

Upstream symbols: the attribute ``_z3_leaf``, read through ``deepspeed.utils.z3_leaf_module``; the section
``zero_optimization.leaf_module``; ``create_reduce_and_remove_grad_hooks``, which hangs the reduction on torch's
``register_full_backward_hook`` (0.19.7, 0.19.8). That hook fires too early, twice or never where a leaf is called
by keyword, gets no input that requires a gradient, returns no tensors or is called twice: :func:`watch_leaf_calls`.
Detected by tests against a plain computation. Expires when DeepSpeed finds such experts itself and waits for their
gradients.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_zero3.config import SetupError

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_EXPERT = re.compile(r"(^|_)experts?($|_|\d)|[a-z]Experts?($|[A-Z])|^Experts?($|[A-Z])")
_ROUTER = re.compile(r"^(moe_)?(gate|gating|gate_network|router|routing|wg|switch|dispatcher)$")


class LeafModuleError(SetupError):
    """A module whose experts ranks choose for themselves can't be gathered and reduced as one."""


def find_expert_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Find the modules whose forward chooses among a list of experts.

    A ``ModuleList`` or ``ModuleDict`` of two or more modules of one class, with parameters, is a list of experts where
    its name, its class or its items' class says "expert", or where a router stands beside it. What is found is the
    module that is called with the tokens: the container itself where it has a forward, else the module that holds it.

    Args:
        root: Any module.

    Returns:
        Dotted name → module, outermost first; none inside another.
    """
    found: dict[str, nn.Module] = {}
    for path, container in root.named_modules():
        if isinstance(container, CONTAINERS) and path and _is_list_of_experts(root, path, container):
            name = _called_module(root, path)
            found[name] = root.get_submodule(name)
    return {name: module for name, module in found.items() if not any(outer in found for outer in _above(name))}


def mark_leaf_modules(root: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Mark the modules around lists of experts as leaves, beside those that the DeepSpeed config names.

    A module on which ``_z3_leaf`` is set already, either way (``deepspeed.utils.set_z3_leaf_module``), stays as it is.

    Args:
        root: The module to train or evaluate.
        config: The DeepSpeed config; its ``zero_optimization.leaf_module`` is checked, and applied by DeepSpeed.

    Returns:
        Names of the modules that were marked here.

    Raises:
        LeafModuleError: The config names a leaf that isn't there, or experts hang on the root module itself.
    """
    _check_configured(root, config)
    marked = []
    for name, module in find_expert_modules(root).items():
        if any("_z3_leaf" in vars(root.get_submodule(part)) for part in (name, *_above(name))):
            continue
        if module is root:
            raise LeafModuleError(
                f"{type(root).__name__} holds a list of experts and calls them itself. Under ZeRO Stage 3 on several "
                "ranks the module around experts is gathered as a whole, and here that would be the whole model. Move "
                "the experts and their router into an nn.Module of their own, with a forward, or say that every rank "
                f"calls every expert: deepspeed.utils.set_z3_leaf_module({type(root).__name__.lower()}, False)."
            )
        module._z3_leaf = True  # type: ignore[assignment]
        marked.append(name)
    if marked:
        rank_zero_info(
            f"Experts in lists: {_listed(marked)} will be gathered and reduced as a whole (DeepSpeed's leaf modules), "
            "so that ranks may use different experts."
        )
    return marked


def warn_of_unmarked(root: nn.Module) -> None:
    """Name the modules that could hang, where ``stock_semantics`` forbids marking them.

    Args:
        root: The module to train.
    """
    unmarked = [name for name, module in find_expert_modules(root).items() if not getattr(module, "_z3_leaf", False)]
    if unmarked:
        rank_zero_warn(
            f"{_listed(unmarked)}: a list of experts, not marked as a leaf module because of stock_semantics=True. The "
            "run hangs as soon as two ranks use different experts. Leave stock_semantics out, or mark it by "
            "zero_optimization.leaf_module in the DeepSpeed config."
        )


def watch_leaf_calls(root: nn.Module) -> None:
    """See to it that every leaf's gradients are reduced after they have been computed.

    Args:
        root: The module of an engine, with its leaves marked.
    """
    for module in root.modules():
        if getattr(module, "_z3_leaf", False) and _make_inputs_watched not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_make_inputs_watched, prepend=True, with_kwargs=True)
            module.register_forward_hook(_require_watched_outputs, prepend=True)
            module.register_full_backward_hook(_refuse_second_reduction, prepend=True)


def _make_inputs_watched(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass tensors by position, and let one of them require a gradient: torch's full backward hook waits for those."""
    if not torch.is_grad_enabled():
        return None
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return None  # the call is wrong, and says so itself
    args, kwargs = bound.args, bound.kwargs
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        args = tuple(
            value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in args
        )
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        raise LeafModuleError(
            f"{type(module).__name__} is a ZeRO Stage 3 leaf module (its experts are gathered as a whole), and its "
            "forward gets no floating-point tensor as an argument of its own, so nothing tells when its gradients are "
            "there. Give its forward the hidden states as a named tensor argument, not inside a dict, list or **kwargs."
        )
    return args, kwargs


def _require_watched_outputs(module: nn.Module, _: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    values = output if isinstance(output, tuple) else (output,)
    watched = type(output) is tuple or isinstance(output, torch.Tensor)
    if not watched or any(not isinstance(value, torch.Tensor) and _requires_grad(value) for value in values):
        raise LeafModuleError(
            f"{type(module).__name__} is a ZeRO Stage 3 leaf module (its experts are gathered as a whole), and its "
            f"forward returns {type(output).__name__}, in which gradients can't be waited for. Return a tensor or a "
            "tuple of tensors."
        )


def _refuse_second_reduction(module: nn.Module, *_: Any) -> None:
    """Upstream reduces at each call's backward, and the second overwrites the first or fails without a word."""
    # torch's number of the backward that is running: a later backward may reduce again.
    running = torch._C._current_graph_task_id()
    if vars(module).get("_zero3_leaf_reduced_in") == running:
        raise LeafModuleError(
            f"{type(module).__name__} is a ZeRO Stage 3 leaf module (its experts are gathered as a whole) and has been "
            "called more than once in one forward, which leaf modules can't be. Call it once, on all tokens together; "
            "or, where every rank calls every expert, say so before the fit: "
            "deepspeed.utils.set_z3_leaf_module(module, False)."
        )
    module._zero3_leaf_reduced_in = running  # type: ignore[assignment]


def _requires_grad(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_requires_grad, items))


def _is_list_of_experts(root: nn.Module, path: str, container: nn.Module) -> bool:
    items = list(container.children())
    # An item may be switched off (None is no child); a stray dropout beside the experts is none of them.
    classes = [type(item) for item in items if next(item.parameters(), None) is not None]
    if len(classes) < 2 or len(set(classes)) != 1:
        return False
    parent, _, own_name = path.rpartition(".")
    names = (own_name, type(container).__name__, classes[0].__name__)
    if any(map(_EXPERT.search, names)):
        return True
    holder = root.get_submodule(parent)
    # A router is a module or a weight; gates, one for each item, are a list themselves and choose nothing.
    beside = [n for n, m in holder.named_children() if not isinstance(m, CONTAINERS)]
    beside += [n for n, _ in holder.named_parameters(recurse=False)]
    return any(map(_ROUTER.search, beside))


def _called_module(root: nn.Module, path: str) -> str:
    """The name of the nearest module, upwards, that has a forward."""
    while path and not _has_forward(root.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _has_forward(module: nn.Module) -> bool:
    unimplemented = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    return type(module).forward not in unimplemented


def _above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _check_configured(root: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse a leaf that the config names and the module lacks; DeepSpeed logs one line and trains on."""
    section = config.get("zero_optimization", {}).get("leaf_module") or {}
    modules = dict(root.named_modules())
    classes = {type(module) for module in modules.values()}
    known = {
        "classes": {n for c in classes for n in (c.__name__, f"{c.__module__}.{c.__qualname__}")},
        "names": set(modules),
        "name_suffixes": set(modules),
    }
    for key, there in known.items():
        wanted = section.get(key, [])
        wanted = [wanted] if isinstance(wanted, str) else wanted
        # A list of classes may be meant for several models.
        if key == "classes" and there.intersection(wanted):
            continue
        for name in wanted:
            if name in there or (key == "name_suffixes" and any(n.endswith(name) for n in there)):
                continue
            close = difflib.get_close_matches(name, sorted(there), n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise LeafModuleError(
                f"The DeepSpeed config's zero_optimization.leaf_module.{key} has {name!r}, and {type(root).__name__} "
                f"has no such module.{hint} Names start at the LightningModule; name_suffixes match from the end."
            )


def _listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join(name or "the module itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
