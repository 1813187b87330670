"""The names of weights in files, in Transformers' models and in an engine's layers; each way, and which part is which.

An engine's layers are others than Transformers': AutoEP's have other names and hold a rank's experts, AutoTP's hold a
rank's slices. A parameter there is a box, or a few, of one tensor of Transformers' model
(:func:`held_tensors`). What files call that tensor, and whether each expert is one of its own there, is asked of
Transformers (:class:`FileNames`), whose rules ``from_pretrained`` and ``save_pretrained`` go by.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe import expert_adapters
from lightning_zero3.moe.adapters import adapters_of, base_name
from lightning_zero3.moe.boxes import Block, Ints

# Text models for which Transformers has no rules of their own, with the composite model whose checkpoints hold them.
_INSIDE = {"minimax_m3_vl_text": "minimax_m3_vl"}
# What composite models call the text model in them.
LANGUAGE_MODEL = "language_model"


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


@dataclass(frozen=True)
class FilePart:
    """A tensor of a file, as the part of Transformers' tensor that it is.

    Args:
        name: Its name in the files.
        block: From Transformers' tensor to the file's.
        shape: The shape that it must have there.
        apart: It is one of a list that Transformers stacks: the block has a dimension more in front, of size 1.
    """

    name: str
    block: Block
    shape: Ints
    apart: bool = False


class FileNames:
    """Transformers' own rules about what files call a model's tensors.

    Upstream symbols: ``conversion_mapping.get_model_conversion_mapping`` and ``get_checkpoint_conversion_mapping``;
    ``core_model_loading``'s ``rename_source_key``, ``apply_renamings``, ``apply_converters``, ``WeightConverter``,
    ``PrefixChange``, ``MergeModulelist`` and ``Concatenate`` (Transformers 5.24). Reason: they work on whole tensors;
    here a rank takes the slices that it holds. A missing name raises, and a rule of another kind is refused by name.

    Args:
        model: A Hugging Face model, with or without an engine's layers.
        whole: Shapes of its tensors by Transformers' names.
    """

    def __init__(self, model: Any, whole: Mapping[str, Ints]) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        if (outer := _INSIDE.get(model.config.model_type)) is not None:
            rules = [
                *get_checkpoint_conversion_mapping(outer),
                PrefixChange(prefix_to_remove=LANGUAGE_MODEL, model_prefix=model.base_model_prefix),
                *rules,
            ]
        self._model, self._whole = model, dict(whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converter_of = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def to_transformers(self, name: str) -> tuple[str, str | None]:
        """What a file's tensor is in Transformers' model.

        Args:
            name: The file's name of it.

        Returns:
            Transformers' name, known or not, and the pattern of the list that it is one of, or None.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._whole)
        if renamed not in self._whole and name in self._whole:
            renamed, pattern = rename_source_key(name, [], [], prefix, self._whole)
        return renamed, pattern

    def sort(self, names: Sequence[str]) -> tuple[dict[str, list[FilePart]], dict[str, str]]:
        """Sort files' names by the tensors of Transformers' model that they are parts of.

        Args:
            names: All names in the files.

        Returns:
            Transformers' names → all parts that it is made of, also such as no file has, and what is a part of none:
            the file's name → what Transformers would call it.

        Raises:
            UnknownLayoutError: A tensor is made of those in the files in a way that isn't read slice by slice.
        """
        parts: dict[str, list[FilePart]] = defaultdict(list)
        others: dict[str, str] = {}
        lists: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for name in names:
            renamed, pattern = self.to_transformers(name)
            if renamed not in self._whole:
                others[name] = renamed
            elif pattern is None:
                shape = self._whole[renamed]
                parts[renamed].append(FilePart(name, Block.of_all(shape), shape))
            else:
                index = self._index(name, pattern)
                if index is None or index in lists[renamed][pattern]:
                    others[name] = renamed
                else:
                    lists[renamed][pattern][index] = name
        for target, by_pattern in lists.items():
            for (pattern, index), part in self._list(target, self._converter_of[next(iter(by_pattern))]).items():
                name = by_pattern[pattern].get(index) or _sibling(by_pattern[pattern], index) or part.name
                parts[target].append(replace(part, name=name))
            taken = {part.name for part in parts[target]}
            others.update({n: target for each in by_pattern.values() for n in each.values() if n not in taken})
        return dict(parts), others

    def saved_as(self, name: str) -> list[FilePart]:
        """What ``save_pretrained`` calls a tensor of Transformers' model, built from a config, in files.

        Args:
            name: Transformers' name.

        Returns:
            The tensors in the files that it is made of.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, apply_converters, apply_renamings

        own = get_model_conversion_mapping(self._model, add_legacy=False)
        kept = [rule for rule in reversed(own) if not isinstance(rule, PrefixChange)]
        reverse = [rule.reverse_transform() for rule in kept]
        converters = [rule for rule in reverse if hasattr(rule, "operations")]
        renamings = [rule for rule in reverse if not hasattr(rule, "operations")]
        first, pattern = apply_converters(name, converters)
        if pattern is None:
            shape = self._whole[name]
            return [FilePart(apply_renamings(name, renamings), Block.of_all(shape), shape)]
        back = next(rule for rule in converters if pattern in rule.source_patterns)
        forth = kept[reverse.index(back)]
        saved = []
        for (source, index), part in self._list(name, forth).items():
            target = back.target_patterns[forth.source_patterns.index(source)]
            each = first.replace(back.target_patterns[0], target).replace("*", str(index))
            saved.append(replace(part, name=apply_renamings(each, renamings)))
        return saved

    def _index(self, name: str, pattern: str) -> int | None:
        """Which of the list a file's tensor is, by the number where the pattern has its star."""
        from transformers.core_model_loading import apply_renamings

        found = re.search(pattern.replace("*.", r"(\d+)\."), apply_renamings(name, self._renamings))
        return None if found is None else int(found[1]) if found.re.groups else 0

    def _list(self, target: str, converter: Any) -> dict[tuple[str, int], FilePart]:
        """The parts that a converter stacks, and joins, to one tensor: by pattern and number."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        shape, sources = self._whole[target], converter.source_patterns
        kinds = [(type(operation), operation.dim) for operation in converter.operations]
        stacks = kinds[0] == (MergeModulelist, 0)
        joins = [dim for kind, dim in kinds if kind is Concatenate]
        dim = joins[0] if joins else len(shape) - 1
        known = kinds == [(MergeModulelist, 0)] * stacks + [(Concatenate, dim)] * len(joins) and dim >= stacks
        if not known or len(joins) != (len(sources) > 1) or shape[dim] % len(sources):
            raise UnknownLayoutError(
                f"Transformers makes {target} of the files' tensors by {converter.operations}, which can't be done "
                "slice by slice. Load this checkpoint by from_pretrained."
            )
        width = shape[dim] // len(sources)
        size = tuple(width if d == dim else 1 if stacks and d == 0 else n for d, n in enumerate(shape))
        parts = {}
        for which, pattern in enumerate(sources):
            for index in range(shape[0] if stacks else 1):
                start = tuple(which * width if d == dim else index if d == 0 else 0 for d in range(len(shape)))
                block = Block(start, (0,) * len(shape), size)
                name = f"{target} ({pattern.replace('*', str(index))})"
                parts[pattern, index] = FilePart(name, block, size[stacks:], apart=stacks)
        return parts


def _sibling(named: Mapping[int, str], index: int) -> str | None:
    """What the files would call another of a list."""
    for each, name in named.items():
        before, found, after = name.rpartition(f".{each}.")
        return f"{before}.{index}.{after}" if found else None
    return None
