# SPDX-License-Identifier: Apache-2.0
"""Whether the load-balancing loss that a model's config asks for is on.

Transformers (5.24) adds ``router_aux_loss_coef`` times an auxiliary loss to the loss of Mixtral, Qwen3-MoE, Qwen3.5-MoE
and MiniMax-M3, but only with ``output_router_logits=True``, in the config or in the call. Its default is False, in
published configs too (0.02 for Mixtral, 0.001 for Qwen3.5), because they are written for inference: a coefficient alone
does nothing, silently. GLM-4.5 has neither loss nor coefficient in Transformers; it is balanced by
:mod:`lightning_zero3.moe.router`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn


def warn_if_off(model: nn.Module, path: str = "") -> None:
    """Name a coefficient without effect in the first training forward, when it is known what the call asks for.

    The option stays the model's own: switching it on here would change the loss of everybody who comes from another
    strategy.

    Args:
        model: A Hugging Face model.
        path: Its dotted name in the module that is trained.
    """
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not coefficient:
        return

    def first_forward(module: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        asked = arguments.get("output_router_logits")
        if asked is None:
            asked = getattr(config, "output_router_logits", False)
        if not asked:
            rank_zero_warn(
                f"{path or type(model).__name__} ({type(model).__name__}) has router_aux_loss_coef={coefficient} in "
                "its config, but output_router_logits is off, so Transformers leaves the load-balancing loss out and "
                "nothing keeps experts evenly used. Set output_router_logits=True in the model's config before "
                "training, or router_aux_loss_coef=0 if that is meant."
            )

    handle = model.register_forward_pre_hook(first_forward, with_kwargs=True)
