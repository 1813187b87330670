# SPDX-License-Identifier: Apache-2.0
"""LoRA on experts and routers under AutoEP: PEFT's adapters stay whole on every rank, and each adds its experts' part.

PEFT wraps what holds a layer's experts, and the router, for parameters of theirs (``target_parameters``; with some
models, of ``target_modules="all-linear"`` too). AutoEP looks for the experts themselves, and builds others of a rank's
part of them. So the wrappers are taken off while it looks and builds, and put beside what it has built, whose weights
are then added to in each forward as PEFT does it. An adapter's gradient on a rank is that of its experts, of the tokens
of all ranks that it gets them from, and zero for others' experts; the mean over ranks, as of any replicated weight, is
therefore the gradient of the mean loss.

Upstream symbols: ``peft.tuners.lora.ParamWrapper``: ``parameter_name``, ``num_experts``, ``_did_swap_in_out_features``,
``scaling``, the order of its two matrices (``get_delta_factors``) (PEFT 0.21); ``GroupedExperts``' ``w1``,
``w2``, ``w3`` and ``TokenChoiceTopKRouter.gate`` (0.19.7, 0.19.8). Detected by tests against PEFT in one process.
Expires when AutoEP takes PEFT's wrappers along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_zero3.moe.adapters import AdapterError, is_tuner_layer, require_apart, tuner_layers

# What the wrappers are called in an AutoEP layer. Not inside `experts`: all that is there is partitioned with them.
EXPERTS, ROUTER = "expert_adapters", "router_adapters"
Taken = dict[str, dict[str, Any]]


class _Elsewhere(nn.Module):
    """Stands where a wrapper had the experts or the router that AutoEP has built anew."""


def check(model: nn.Module, preset: Any, where: str, *, slices: int = 1) -> None:
    """Refuse adapters that AutoEP's layers would lose, or compute otherwise.

    Args:
        model: The Hugging Face model.
        preset: AutoEP's, a ``MoEModelPreset``.
        where: What a message calls the model.
        slices: The tensor parallel size.

    Raises:
        AdapterError: There is one, with its place and what to do.
    """
    layers = _moe_layers(model, preset)
    if not layers or next(tuner_layers(model), None) is None:
        return
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import AuxiliaryTrainingWrapper

    whole = [n for n, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    for name, layer in layers.items():
        parts = {f"{name}.{part}": getattr(layer, part) for part in (preset.experts_pattern, preset.router_pattern)}
        trained = [n for n in whole if n in parts or name == n or name.startswith(f"{n}.")]
        if trained:
            raise AdapterError(
                f"modules_to_save has {trained[0]} of {where}: PEFT trains a copy of it beside it, and AutoEP would "
                "take one of the two. Leave it out and train it itself: after get_peft_model, requires_grad_(True) on "
                "its parameters; or train an adapter (target_parameters); or leave expert_parallel_size out."
            )
        for part, module in parts.items():
            for wrapper in _chain(module):
                require_apart(f"{part} of {where}", wrapper)
                fits = isinstance(wrapper, ParamWrapper) and getattr(wrapper, "_did_swap_in_out_features", None) == (
                    part.endswith(preset.experts_pattern)
                )
                if not fits:
                    raise AdapterError(
                        f"{part} of {where} has PEFT's {type(wrapper).__module__}.{type(wrapper).__name__}, and under "
                        "expert_parallel_size experts and routers take LoRA of their parameters only: "
                        f"LoraConfig(target_parameters=[...]). Take that, or leave expert_parallel_size out."
                    )
                if slices > 1:
                    raise AdapterError(
                        f"{part} of {where} has an adapter, and expert_parallel_size with tensor_parallel_size={slices}"
                        " shares its tokens out among peers. Leave one of the two sizes out; or adapt other layers "
                        "(target_modules as a list: with some models 'all-linear' means the experts too)."
                    )


@contextmanager
def laid_bare(model: nn.Module, preset: Any) -> Iterator[Taken]:
    """Take PEFT's wrappers off experts and routers, for AutoEP to find them; those that stay in are put back.

    Args:
        model: The Hugging Face model.
        preset: AutoEP's.

    Yields:
        Name of an MoE layer → name of the part → the wrapper that it had.
    """
    taken: Taken = {}
    layers = _moe_layers(model, preset)
    for name, layer in layers.items():
        for part in (preset.experts_pattern, preset.router_pattern):
            wrapper = next(iter(_chain(getattr(layer, part))), None)
            if wrapper is not None:
                taken.setdefault(name, {})[part] = wrapper
                setattr(layer, part, wrapper.get_base_layer())
    try:
        yield taken
    finally:
        for name, wrappers in taken.items():
            for part, wrapper in wrappers.items():
                setattr(layers[name], part, wrapper)


def put_beside(model: nn.Module, preset: Any, taken: Mapping[str, Mapping[str, Any]]) -> None:
    """Have AutoEP's layers compute with the adapters of the layers that they stand for.

    Args:
        model: The Hugging Face model with AutoEP's layers.
        preset: AutoEP's.
        taken: From :func:`laid_bare`.
    """
    for name, wrappers in taken.items():
        layer: Any = model.get_submodule(name)
        for part, wrapper in wrappers.items():
            chain = list(_chain(wrapper))
            chain[-1].base_layer = _Elsewhere()
            if part == preset.experts_pattern:
                layer.add_module(EXPERTS, wrapper)
                local = slice(layer.ep_rank * layer.num_local_experts, (layer.ep_rank + 1) * layer.num_local_experts)
                by_name = {each.parameter_name: each for each in chain}
                joined, down = by_name.get(preset.expert_w1), by_name.get(preset.expert_w2)
                _adapt(layer.experts, {"w1": (joined, local, 0), "w3": (joined, local, 1), "w2": (down, local, None)})
            else:
                layer.add_module(ROUTER, wrapper)
                _adapt(layer.router.gate, {"weight": (wrapper, slice(0, 1), None)})


def _moe_layers(model: nn.Module, preset: Any) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, preset.experts_pattern) and hasattr(module, preset.router_pattern)
    }


def _chain(module: Any) -> Iterator[Any]:
    """PEFT's wrappers around a module, the outermost first: one for each parameter."""
    each: Any = module
    while is_tuner_layer(each):
        yield each
        each = each.base_layer


# Which wrapper adds to a weight, for which experts, and to which half of what two weights are to PEFT.
_Sources = Mapping[str, tuple[Any, slice, int | None]]


def _adapt(module: Any, sources: _Sources) -> None:
    kind: Any = type(module)

    class Adapted(kind):  # type: ignore[misc]
        """The same module, with its hooks and parameters, that computes with adapted weights."""

        def forward(self, *arguments: Any) -> Any:
            """As its class's, with adapted weights."""
            return kind.forward(_WithWeights(self, self.adapters), *arguments)

    Adapted.__name__ = Adapted.__qualname__ = kind.__name__
    module.__class__ = Adapted
    # A dict, not a module: its adapters are named elsewhere.
    module.adapters = {name: each for name, each in sources.items() if each[0] is not None}


class _WithWeights:
    """A module with other weights, for one forward."""

    def __init__(self, module: Any, sources: _Sources) -> None:
        self._module = module
        self._weights = {name: _adapted(getattr(module, name), *source) for name, source in sources.items()}

    def __getattr__(self, name: str) -> Any:
        weights = self.__dict__["_weights"]
        return weights[name] if name in weights else getattr(self.__dict__["_module"], name)


def _adapted(weight: torch.Tensor, wrapper: Any, local: slice, half: int | None) -> torch.Tensor:
    """A weight, with what the active adapters add to it: PEFT's ``get_delta_factors``, of some experts."""
    for name in () if wrapper.disable_adapters else wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        first, second = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        experts = wrapper.num_experts
        right = first.reshape(experts, -1, first.shape[-1])[local]
        left = second.reshape(second.shape[0], -1, experts).permute(2, 0, 1)[local]
        if half is not None:
            left = left.chunk(2, dim=1)[half]
        left, right = left.to(weight.dtype), right.to(weight.dtype)
        base = weight if weight.dim() == left.dim() else weight.unsqueeze(0)
        weight = torch.baddbmm(base, left, right, alpha=wrapper.scaling[name]).reshape(weight.shape)
    return weight
