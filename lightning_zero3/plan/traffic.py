# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank's collectives move in a step, by kind: what DeepSpeed sends for a given structure.

Exact where no weight, or every weight, stays gathered between forward and backward. In between, a few modules at the
edge of DeepSpeed's reuse distance are counted that it keeps.

Not modelled: the gathers by which tensor-parallel peers put an MoE layer's output together again, their sums of the
gradients of q_norm and k_norm, the second gather of a convolution's weights in Qwen's linear attention, hpZeRO,
quantised gathers, and barriers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import ELEMENT_BYTES, PlannedParameter, Structure

Kind = Literal["all-gather", "reduce-scatter", "all-to-all", "all-reduce"]

# DeepSpeed's stage3_max_reuse_distance: weights stay gathered if they are used again within so many elements.
MAX_REUSE_DISTANCE = 1_000_000_000
_NORM_BYTES = 8
_COUNT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of message.

    Args:
        what: In words.
        kind: Of collective.
        group_size: Ranks that take part.
        stride: Distance between one of them and the next: 1 for neighbours, which fill nodes first.
        buffer_bytes: In one optimizer step and on one rank, of the larger of the collectives' two buffers: what is
            gathered, what is scattered, what is exchanged (one's own share included), what is reduced.
    """

    what: str
    kind: Kind
    group_size: int
    stride: int
    buffer_bytes: int

    @property
    def sent_bytes(self) -> float:
        """What a rank has to send at least, by a ring or directly: all but its own share, twice for an all-reduce."""
        share = self.buffer_bytes * (self.group_size - 1) / self.group_size
        return 2 * share if self.kind == "all-reduce" else share


def traffic_of(
    structure: Structure,
    shape: Shape,
    *,
    tokens: int,
    world_size: int,
    expert_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    recompute: bool = True,
    micro_steps: int = 1,
    max_reuse_distance: int = MAX_REUSE_DISTANCE,
) -> tuple[Traffic, ...]:
    """Every kind of message of one optimizer step with zero3_fast; none of groups of one rank.

    Tokens are taken to be spread evenly over the experts. The sum over ranks is exact however they are spread.

    Args:
        structure: What the rank holds.
        shape: The model's sizes.
        tokens: Of one micro-step on one rank.
        world_size: Ranks altogether.
        expert_parallel_size: Ranks that share one set of experts.
        tensor_parallel_size: Ranks that share each layer.
        recompute: Whether layers are computed again in backward.
        micro_steps: Micro-steps of one optimizer step.
        max_reuse_distance: DeepSpeed's ``stage3_max_reuse_distance``.
    """
    weight, reduced = (ELEMENT_BYTES[name] for name in (structure.dtypes.weights, structure.dtypes.reductions))
    parted = [p for p in structure.parameters if p.group_size > 1]
    gathered = [p for p in parted if not p.persistent]
    reduced_ones = [p for p in parted if p.requires_grad and not _only_chooses(p)]
    again = _gathered_again(structure.parameters, max_reuse_distance, recompute)
    found = [
        *_by_group("weights, forward", "all-gather", gathered, weight * micro_steps, world_size),
        *_by_group(
            "weights, backward",
            "all-gather",
            [p for p in gathered for _ in range(again[p.name])],
            weight * micro_steps,
            world_size,
        ),
        *_by_group("gradients", "reduce-scatter", reduced_ones, reduced * micro_steps, world_size),
    ]
    layers = len({p.name.partition(".experts.")[0] for p in structure.parameters if p.kind == "expert"})
    forwards = (2 if recompute else 1) * micro_steps
    rows = tokens * shape.experts_per_token // tensor_parallel_size * shape.hidden * weight * layers
    experts = (
        ("tokens to experts", rows * (forwards + micro_steps)),
        ("tokens from experts", rows * (forwards + micro_steps)),
        ("counts of tokens", shape.experts * _COUNT_BYTES * layers * forwards),
    )
    if layers and expert_parallel_size > 1:
        found += [_traffic(what, "all-to-all", expert_parallel_size, 1, size) for what, size in experts]
    if tensor_parallel_size > 1:
        row, column = _split_layers(structure.parameters, shape, tensor_parallel_size)
        size = tokens * shape.hidden * weight * (row * forwards + column * micro_steps)
        found.append(_traffic("tensor parallelism", "all-reduce", tensor_parallel_size, 1, size))
    found += _by_group("persistent weights", "all-gather", [p for p in parted if p.persistent], weight, world_size)
    for norm in structure.norms:
        found += [
            _traffic(
                "norms",
                "all-reduce",
                ranks,
                1 if ranks == expert_parallel_size else world_size // ranks,
                _NORM_BYTES * len(norm.sub_groups),
            )
            for ranks in norm.group_sizes
        ]
    return tuple(each for each in found if each.buffer_bytes)


def _traffic(what: str, kind: Kind, ranks: int, stride: int, size: int) -> Traffic:
    return Traffic(what=what, kind=kind, group_size=ranks, stride=stride, buffer_bytes=size)


def _by_group(
    what: str, kind: Kind, parameters: Iterable[PlannedParameter], element: int, world_size: int
) -> list[Traffic]:
    sizes: dict[int, int] = {}
    for parameter in parameters:
        whole = parameter.partition_elements * parameter.group_size  # padding is sent too
        sizes[parameter.group_size] = sizes.get(parameter.group_size, 0) + whole * element
    return [_traffic(what, kind, ranks, world_size // ranks, size) for ranks, size in sizes.items()]


def _gathered_again(parameters: Iterable[PlannedParameter], distance: int, recompute: bool) -> Counter[str]:
    """How often backward gathers a weight anew, which is how often DeepSpeed has released it.

    A weight is released after a use if the modules that run until its next one have so many elements. Between a
    module's forward and its backward lies the rest of the model, forward and backward; between a layer's recomputed
    forward and its backward, the rest of the layer, and nothing for its last module, whose output nobody needs again.
    """
    layers: dict[str, dict[str, list[PlannedParameter]]] = {}
    for parameter in parameters:
        modules = layers.setdefault(_layer_of(parameter.name), {})
        modules.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    again: Counter[str] = Counter()
    after = computed_again = 0  # elements that come later in the model, and those of them that are recomputed
    for layer, modules in reversed(layers.items()):
        sizes = {name: sum(p.elements for p in members) for name, members in modules.items()}
        whole, rest, last = sum(sizes.values()), 0, True
        for name, members in reversed(modules.items()):
            released = 2 * (after + rest) >= distance
            if layer and recompute:
                released = 2 * after + computed_again + whole - sizes[name] >= distance
            for parameter in members:
                backward = parameter.requires_grad and not _only_chooses(parameter)
                again[parameter.name] += released and (backward or (layer != "" and recompute))
                if layer and recompute and not last:
                    again[parameter.name] += backward and 2 * rest >= distance
            last = last and all(parameter.persistent for parameter in members)
            rest += sizes[name]
        after += whole
        computed_again += whole if layer and recompute else 0
    return again


def _only_chooses(parameter: PlannedParameter) -> bool:
    """Whether a weight's output is used for a choice alone, through which no gradient comes back: MiniMax's indexer."""
    return ".indexer." in parameter.name


def _layer_of(name: str) -> str:
    """The layer that a parameter is in, as far as activations are recomputed layer by layer; empty outside of layers.

    >>> _layer_of("model.layers.3.mlp.gate.weight"), _layer_of("lm_head.weight")
    ('model.layers.3', '')
    """
    found = re.match(r"(.*\blayers\.\d+)\.", name)
    return found[1] if found else ""


def _split_layers(parameters: Iterable[PlannedParameter], shape: Shape, ranks: int) -> tuple[int, int]:
    """Layers split by rows, each summed in forward, and by columns, each of whose input gradients is summed."""
    inputs = {p.name: p.shape[1] for p in parameters if p.kind == "dense" and len(p.shape) == 2}
    whole = shape.heads * shape.value_dim
    # Some models' attention is left whole; their MLPs are always split.
    attention = {
        name.rpartition(".o_proj.")[0]
        for name, width in inputs.items()
        if ".o_proj." in name and width * ranks == whole
    }
    row = column = 0
    for name in inputs:
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        row += part == "down_proj" or (part == "o_proj" and layer in attention)
        column += part in ("gate_proj", "up_proj", "gate_up_proj")
        column += part in ("q_proj", "k_proj", "v_proj") and layer in attention
    return row, column
