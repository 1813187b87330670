# SPDX-License-Identifier: Apache-2.0
"""Which part of which of Transformers' tensors a weight in an engine's layers is.

An engine's layers are others than Transformers': AutoEP's have other names and hold a rank's experts, AutoTP's hold a
rank's slices. A parameter there is a box, or a few, of one tensor of Transformers' model (:func:`held_tensors`). What
files call that tensor is ``file_names.py``'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe import expert_adapters
from lightning_zero3.moe.adapters import adapters_of, base_name
from lightning_zero3.moe.boxes import Block, Ints


class UnknownLayoutError(SetupError):
    """It isn't known which part of Transformers' tensor a weight is."""


@dataclass(frozen=True)
class Held:
    """What of Transformers' model one parameter or buffer of a model with an engine's layers is.

    Args:
        name: Transformers' name of the tensor, inside its model.
        whole: The tensor's shape.
        blocks: From the parameter to the tensor.
    """

    name: str
    whole: Ints
    blocks: tuple[Block, ...]


# AutoEP's experts: of how many matrices Transformers' tensor is made, one below the other, and which of them this is.
EXPERTS = {"experts.w1": (2, 0), "experts.w3": (2, 1), "experts.w2": (1, 0)}
_LAYER_PARTS = re.compile(
    rf"(.+?)\.((?:router|experts|shared_experts|shared_experts_gate|{expert_adapters.EXPERTS}|{expert_adapters.ROUTER})\..+)"
)


@dataclass(frozen=True)
class LayerNames:
    """What Transformers calls the parts of an MoE layer that AutoEP calls router, experts and shared_experts.

    Args:
        router: The router.
        experts: What holds the experts.
        gate_up: The experts' first tensor, of gate and up.
        down: Their second one.
        shared: The shared experts.
        shared_gate: The gate of the shared experts.
    """

    router: str = "gate"
    experts: str = "experts"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"

    @classmethod
    def of_preset(cls, preset: Any) -> LayerNames:
        """As one of AutoEP's presets has them.

        Args:
            preset: A ``MoEModelPreset``.
        """
        return cls(
            preset.router_pattern,
            preset.experts_pattern,
            preset.expert_w1,
            preset.expert_w2,
            preset.shared_experts_pattern,
            preset.shared_experts_gate_pattern,
        )

    @classmethod
    def like(cls, names: Iterable[str]) -> LayerNames:
        """As a model has them.

        Args:
            names: Transformers' names of its tensors.
        """
        return cls(shared="shared_expert" if any(".shared_expert." in name for name in names) else "shared_experts")

    def of(self, inside: str) -> str | None:
        """Transformers' name of a tensor of an AutoEP layer.

        Args:
            inside: AutoEP's, from the layer on.

        Returns:
            Transformers', from the layer on; None for what it doesn't have.

        >>> LayerNames().of("router.gate.weight"), LayerNames().of("experts.w3"), LayerNames().of("expert_bias")
        ('gate.weight', 'experts.gate_up_proj', None)
        """
        part, _, leaf = inside.partition(".")
        if inside in EXPERTS:
            return f"{self.experts}.{self.down if inside == 'experts.w2' else self.gate_up}"
        if part == "router":
            return f"{self.router}.{leaf.removeprefix('gate.')}"
        renamed = {
            "shared_experts": self.shared,
            "shared_experts_gate": self.shared_gate,
            expert_adapters.EXPERTS: self.experts,
            expert_adapters.ROUTER: self.router,
        }.get(part)
        return None if renamed is None else f"{renamed}.{leaf}"


def of_layers(name: str, layer: LayerNames) -> tuple[str, str | None]:
    """Transformers' name of a tensor, by its name alone.

    Args:
        name: AutoEP's, or one that both have.
        layer: What the model calls the parts of an MoE layer.

    Returns:
        Transformers', and which of AutoEP's experts' tensors it is, or None.

    >>> of_layers("model.layers.1.mlp.router.gate.weight", LayerNames())
    ('model.layers.1.mlp.gate.weight', None)
    >>> of_layers("model.layers.1.mlp.experts.w3", LayerNames())
    ('model.layers.1.mlp.experts.gate_up_proj', 'experts.w3')
    """
    found = _LAYER_PARTS.fullmatch(name)
    theirs = None if found is None else layer.of(found[2])
    if found is None or theirs is None:
        return name, None
    return f"{found[1]}.{theirs}", found[2] if found[2] in EXPERTS else None


def local_shape(tensor: torch.Tensor) -> Ints:
    """A tensor's shape on this rank: before ZeRO has partitioned it, after experts and slices were shared out."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def held_tensors(model: nn.Module) -> dict[str, tuple[torch.Tensor, Held]]:
    """Every parameter and saved buffer of a model, and what it is of Transformers' model.

    Upstream symbols: the attributes ``ep_size``, ``ep_rank`` and ``model_family`` of ``AutoEPMoELayer``, the names in
    its presets, ``tp_index`` of ``TensorParallel_Layer`` and ``ds_autotp_universal_checkpoint_meta`` of its parameters
    (0.19.7, 0.19.8). Reason: nothing else tells which part a rank holds. What is missing there is an error.

    Args:
        model: A Hugging Face model, with or without AutoEP's and AutoTP's layers.

    Returns:
        By the model's own names; tied ones each under theirs. Without what Transformers' model doesn't have. PEFT's own
        tensors, which it hasn't either, are there, called as in a whole model with adapters; what PEFT has wrapped is
        called as without it.

    Raises:
        UnknownLayoutError: A layer doesn't say what it holds.
    """
    found: dict[str, tuple[torch.Tensor, Held]] = {}
    layers: dict[str, nn.Module] = {}
    adapted = adapters_of(model) is not None
    for path, module in model.named_modules():
        if getattr(module, "_is_autoep_layer", False):
            layers[path] = module
        saved = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for leaf, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            owner = next((each for each in layers if name.startswith(f"{each}.")), None)
            if owner is not None:
                held = _in_moe_layer(owner, layers[owner], name, module, tensor)
            else:
                held = _sliced(name, module, tensor)
            if held is not None:
                found[name] = tensor, replace(held, name=base_name(held.name)) if adapted else held
    return found


def _in_moe_layer(path: str, layer: Any, name: str, module: nn.Module, tensor: torch.Tensor) -> Held | None:
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset = get_preset(layer.model_family)
    if preset.expert_w3 is not None:
        raise UnknownLayoutError(f"AutoEP's preset {layer.model_family!r} stores experts in an unknown way.")
    names, inside = LayerNames.of_preset(preset), name.removeprefix(f"{path}.")
    if inside in EXPERTS:
        return _experts(f"{path}.{names.of(inside)}", inside, layer, local_shape(tensor))
    theirs = names.of(inside)
    return None if theirs is None else _sliced(f"{path}.{theirs}", module, tensor)


def _experts(name: str, inside: str, layer: Any, shape: Ints) -> Held:
    experts, rows, columns = shape
    joined, place = EXPERTS[inside]
    start = (layer.ep_rank * experts, place * rows, 0)
    return Held(name, (experts * layer.ep_size, joined * rows, columns), (Block((0, 0, 0), start, shape),))


def _sliced(name: str, module: nn.Module, tensor: torch.Tensor) -> Held:
    shape = local_shape(tensor)
    if not hasattr(module, "tp_world_size") or getattr(module, "tp_world_size", 1) == 1:
        return Held(name, shape, (Block.of_all(shape),))
    meta: Mapping[str, Any] = getattr(tensor, "ds_autotp_universal_checkpoint_meta", {})
    whole, dim = meta.get("original_shape"), meta.get("partition_dim")
    if whole is not None and (meta.get("replicated") or dim is None) and tuple(whole) == shape:
        return Held(name, shape, (Block.of_all(shape),))
    widths = meta.get("sub_param_shard_widths") or ([meta["partition_sizes"]] if meta.get("partition_sizes") else None)
    if whole is None or dim is None or widths is None or tuple(meta["logical_shape"]) != tuple(whole):
        raise UnknownLayoutError(
            f"{name} is split by {type(module).__name__}, which doesn't say how. Weights can be loaded before the "
            "engine is built: in configure_model, or in __init__."
        )
    blocks, here, there = [], 0, 0
    for each in widths:
        begin, width = there + sum(each[: module.tp_index]), each[module.tp_index]
        size = tuple(width if d == dim else n for d, n in enumerate(whole))
        blocks.append(Block(_at(dim, here, whole), _at(dim, begin, whole), size))
        here, there = here + width, there + sum(each)
    return Held(name, tuple(whole), tuple(blocks))


def _at(dim: int, position: int, shape: Sequence[int]) -> Ints:
    return tuple(position if d == dim else 0 for d in range(len(shape)))
