# SPDX-License-Identifier: Apache-2.0
"""How evenly a layer's tokens go to its experts, from counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_zero3.metrics import names


def router_load(counts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Load, entropy and dead experts of each layer and over all of them.

    Args:
        counts: Layer → tokens of each of its experts, of all ranks.

    Returns:
        Metric name → value. A layer without any token has none: nothing was counted there.

    >>> router_load({"layer_1": [6, 2, 0, 0]})["moe/expert_load_max_over_mean/layer_1"]
    3.0
    >>> router_load({"layer_1": [2, 2], "layer_2": [4, 0]})["moe/dead_experts"]
    1.0
    """
    values: dict[str, float] = {}
    layers = {layer: tokens for layer, tokens in counts.items() if sum(tokens) > 0}
    if not layers:
        return values
    loads = {layer: max(tokens) * len(tokens) / sum(tokens) for layer, tokens in layers.items()}
    entropies = {layer: entropy(tokens) for layer, tokens in layers.items()}
    dead = {layer: float(sum(1 for count in tokens if count == 0)) for layer, tokens in layers.items()}
    for name, by_layer, over_all in (
        (names.EXPERT_LOAD, loads, max(loads.values())),
        (names.EXPERT_ENTROPY, entropies, min(entropies.values())),
        (names.DEAD_EXPERTS, dead, sum(dead.values())),
    ):
        values[name] = over_all
        values.update({names.of_layer(name, layer): value for layer, value in by_layer.items()})
    return values


def entropy(tokens: Sequence[float]) -> float:
    """Entropy of shares, over that of equal shares; 1 for a single expert, which is even.

    Args:
        tokens: Of each expert; one at least isn't 0.

    >>> entropy([5, 5, 5, 5]), entropy([7, 0])
    (1.0, 0.0)
    """
    if len(tokens) == 1:
        return 1.0
    total = sum(tokens)
    shares = [count / total for count in tokens if count]
    # The sum of one share, 1, would be -0.
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(tokens))
