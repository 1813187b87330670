# SPDX-License-Identifier: Apache-2.0
"""How many tokens each expert has got: counted where a router's weights get a gradient.

A token counts when a backward runs through its router's weights. So a forward of validation, or one whose loss is never
used, doesn't count, and activation checkpointing, which runs forward twice and backward once, counts once.

Upstream symbols: ``AutoEPMoELayer.tokens_per_expert``, which isn't used, because it also counts validation and the
second forward of activation checkpointing; ``TokenChoiceTopKRouter``, whose histogram of each call is used (0.19.7,
0.19.8). In Transformers 5.24 a router returns the chosen experts last. Detected by tests. Expires when DeepSpeed's own
count is of training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


class ExpertCounts:
    """Counts in all routers of a model, in one tensor.

    Args:
        routers: Name → router, Transformers' own or AutoEP's, in the model's order.
        sizes: Name → its number of experts.
        device: Where the counts lie.
        no_choice: Called with a router's name and itself when it doesn't return what it has chosen; it then counts
            nothing, unless this raises.

    Attributes:
        counts: Tokens of each expert so far, of all routers one after the other; whole numbers.
        sizes: Each router's number of experts, in the same order.
        on: Whether forwards are watched.
    """

    def __init__(
        self,
        routers: Mapping[str, nn.Module],
        sizes: Mapping[str, int],
        device: torch.device | str,
        no_choice: Callable[[str, nn.Module], None] = lambda *_: None,
    ) -> None:
        from deepspeed.moe.ep_router import TokenChoiceTopKRouter

        self.sizes = [sizes[name] for name in routers]
        self.on = True
        # One tensor for all layers, for one reduction and one update. Whole numbers: a mean of floats can hide a token.
        self.counts = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self._no_choice = no_choice
        self._hooks = [
            router.register_forward_hook(partial(self._watch, name, counts, isinstance(router, TokenChoiceTopKRouter)))
            for (name, router), counts in zip(routers.items(), self.counts.split(self.sizes), strict=True)
        ]

    def _watch(self, name: str, counts: torch.Tensor, is_autoep: bool, router: nn.Module, _: Any, output: Any) -> None:
        if not self.on or not torch.is_grad_enabled():
            return
        tensors = [value for value in output if torch.is_tensor(value)] if isinstance(output, tuple) else []
        whole = [value for value in tensors if not value.is_floating_point()]
        if not whole:
            self._no_choice(name, router)
            return
        weights = [value for value in tensors if value.requires_grad]
        if not weights:
            return
        seen: list[torch.Tensor] = [whole[-1] if is_autoep else _histogram(whole[-1], counts.numel())]

        def backward_runs(_: torch.Tensor) -> None:
            if seen:
                counts.add_(seen.pop())

        weights[-1].register_hook(backward_runs)

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def routers_in(root: nn.Module) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Find the routers beside experts, Transformers' own or AutoEP's.

    Args:
        root: Any module.

    Returns:
        Dotted name → router, in the model's order; dotted name → number of experts.
    """
    routers: dict[str, nn.Module] = {}
    sizes: dict[str, int] = {}
    for path, module in root.named_modules():
        if not hasattr(module, "experts"):
            continue
        for name in ("router", "gate"):
            router = getattr(module, name, None)
            experts = _number_of_experts(router)
            if isinstance(router, nn.Module) and experts is not None:
                where = f"{path}.{name}" if path else name
                routers[where], sizes[where] = router, experts
                break
    return routers, sizes


def _number_of_experts(router: Any) -> int | None:
    """None for what isn't known to return its choice; a linear layer returns logits."""
    if not isinstance(router, nn.Module) or isinstance(router, nn.Linear):
        return None
    declared = getattr(router, "num_experts", None) or getattr(router, "n_routed_experts", None)
    return declared if isinstance(declared, int) else None


def _histogram(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen; unlike ``bincount``, a GPU needn't wait for it."""
    flat = chosen.detach().reshape(-1).long()
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
