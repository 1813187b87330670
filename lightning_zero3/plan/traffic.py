"""Bytes that one rank's collectives move in a step, by kind: what DeepSpeed sends for a given structure.

What isn't modelled: the gathers by which tensor-parallel peers put an MoE layer's output together again, hpZeRO,
quantised gathers, and barriers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import ELEMENT_BYTES, PlannedParameter, Structure

Kind = Literal["all-gather", "reduce-scatter", "all-to-all", "all-reduce"]

# DeepSpeed's stage3_max_reuse_distance: a module's weights stay gathered if they are used again within so many elements.
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
    again = _gathered_again(structure.parameters, max_reuse_distance)
    found = [
        *_by_group("weights, forward", "all-gather", gathered, weight * micro_steps, world_size),
        *_by_group(
            "weights, backward", "all-gather", [p for p in gathered if p.name in again], weight * micro_steps, world_size
        ),
        *_by_group(
            "gradients", "reduce-scatter", [p for p in parted if p.requires_grad], reduced * micro_steps, world_size
        ),
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


def _by_group(what: str, kind: Kind, parameters: Iterable[PlannedParameter], element: int, world_size: int) -> list[Traffic]:
    sizes: dict[int, int] = {}
    for parameter in parameters:
        whole = parameter.partition_elements * parameter.group_size  # padding is sent too
        sizes[parameter.group_size] = sizes.get(parameter.group_size, 0) + whole * element
    return [_traffic(what, kind, ranks, world_size // ranks, size) for ranks, size in sizes.items()]


def _gathered_again(parameters: Iterable[PlannedParameter], distance: int) -> set[str]:
    """Weights that backward gathers anew: those that DeepSpeed released after forward.

    Between a module's forward and its backward lies the rest of the model, twice. (With recomputation the second use
    is the recomputed forward, and the third follows at once.)
    """
    again, passed = set(), 0
    for parameter in reversed(list(parameters)):
        if 2 * passed >= distance:
            again.add(parameter.name)
        passed += parameter.elements
    return again


def _split_layers(parameters: Iterable[PlannedParameter], shape: Shape, ranks: int) -> tuple[int, int]:
    """Layers split by rows, each summed in forward, and by columns, each of whose input gradients is summed."""
    attention = {
        "q_proj": shape.heads * shape.head_dim,
        "k_proj": shape.key_value_heads * shape.head_dim,
        "v_proj": shape.key_value_heads * shape.value_dim,
        "o_proj": shape.heads * shape.value_dim,
    }
    row = column = 0
    widths: dict[str, int] = {}
    for parameter in parameters:
        layer, _, name = parameter.name.removesuffix(".weight").rpartition(".")
        if not parameter.name.endswith(".weight") or len(parameter.shape) != 2 or parameter.kind != "dense":
            continue
        out, into = parameter.shape
        if name in attention and (into if name == "o_proj" else out) * ranks in (attention[name], 2 * attention[name]):
            widths[layer] = ranks
        if name in ("o_proj", "down_proj"):
            row += name == "down_proj" or layer in widths
        elif name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"):
            column += name not in attention or layer in widths
    return row, column
