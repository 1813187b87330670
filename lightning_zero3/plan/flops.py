# SPDX-License-Identifier: Apache-2.0
"""Operations of one micro-step on one rank: matrix products only, as ``torch.utils.flop_counter`` counts them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import PlannedParameter

# An expert of a list: experts.7.up_proj.weight.
_EXPERT_OF_A_LIST = re.compile(r"\bexperts\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of one forward, by kind; a multiplication and an addition are two.

    Args:
        linear: Dense layers: projections, dense MLPs, shared experts, routers.
        experts: Routed experts, as many as see each token, evenly spread over the ranks.
        attention: Scores and weighted sums, of the keys that a query sees.
        indexer: Projections and scores by which sparse attention chooses its keys; a choice has no backward.
        linear_attention: Three products with the state per token, as the recurrence has them. Kernels that work by
            chunks do more.
        logits: The last projection.
    """

    linear: int
    experts: int
    attention: int
    indexer: int
    linear_attention: int
    logits: int

    @property
    def forward(self) -> int:
        """All of one forward."""
        return self.layers + self.logits

    @property
    def layers(self) -> int:
        """What is computed again when activations are."""
        return self.linear + self.experts + self.attention + self.indexer + self.linear_attention

    def training(self, recompute: bool) -> int:
        """Forward and backward, which has two products for each of forward's.

        Args:
            recompute: Whether layers are computed again in backward: 4/3 of their operations.
        """
        return 3 * self.forward - 2 * self.indexer + (self.layers if recompute else 0)


def flops_of(
    parameters: Iterable[PlannedParameter],
    shape: Shape,
    *,
    sequence_length: int,
    samples: int = 1,
    tensor_parallel_size: int = 1,
    causal: bool = True,
) -> Flops:
    """Count one forward.

    Norms, activations, rotary tables, convolutions over four tokens and the loss are left out: far below a hundredth.

    Args:
        parameters: On this rank; slices where layers are split.
        shape: The model's sizes.
        sequence_length: Tokens of a sample.
        samples: In the micro-batch.
        tensor_parallel_size: Ranks that share the heads, and the experts' tokens.
        causal: Whether a query sees the keys up to its own only, as fused attention computes it. Without, all of the
            square, as Transformers' ``eager`` attention does.
    """
    tokens = sequence_length * samples
    linear = experts = indexer = logits = 0
    for parameter in parameters:
        size = parameter.elements
        if len(parameter.shape) < 2 or parameter.name.endswith(("embed_tokens.weight", "conv1d.weight")):
            continue
        if parameter.name.endswith("lm_head.weight"):
            logits += 2 * tokens * size
        elif parameter.kind == "expert":
            # Each of the ranks that share experts works on as many rows as its own tokens send out.
            rows = tokens * shape.experts_per_token // tensor_parallel_size
            held = shape.experts if _EXPERT_OF_A_LIST.search(parameter.name) else parameter.shape[0]
            experts += 2 * rows * size // held
        elif ".indexer." in parameter.name:
            indexer += 2 * tokens * size
        else:
            linear += 2 * tokens * size
    if shape.tied and not logits:
        logits = 2 * tokens * shape.hidden * shape.vocabulary
    kinds = shape.layer_types
    width = shape.heads * (shape.head_dim + shape.value_dim) // tensor_parallel_size
    attention = sum(
        2 * samples * width * _pairs(sequence_length, _keys(kind, shape), causal)
        for kind in kinds
        if kind != "linear_attention"
    )
    index = 2 * samples * shape.index_width * _pairs(sequence_length, 0, causal)
    return Flops(
        linear=linear,
        experts=experts,
        attention=attention,
        indexer=indexer + index * kinds.count("minimax_m3_sparse"),
        linear_attention=6 * tokens * shape.state * kinds.count("linear_attention") // tensor_parallel_size,
        logits=logits,
    )


def _keys(kind: str, shape: Shape) -> int:
    """The most keys that a query of this kind of attention sees; 0 is no limit."""
    return {"sliding_attention": shape.window, "minimax_m3_sparse": shape.sparse_keys}.get(kind, 0)


def _pairs(length: int, most: int, causal: bool) -> int:
    """Pairs of a query and a key that it sees.

    >>> _pairs(4, 0, True), _pairs(4, 2, True), _pairs(4, 0, False)
    (10, 7, 16)
    """
    if not causal:
        return length * length
    within = min(length, most) if most else length
    return within * (within + 1) // 2 + (length - within) * within
