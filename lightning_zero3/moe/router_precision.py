# SPDX-License-Identifier: Apache-2.0
"""Router logits in the precision in which Transformers computes them: GLM's in fp32, whatever the training dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero3.moe.router_trial import WIDTH, try_router


class Fp32Gate(nn.Linear):
    """A gate whose logits are computed in fp32 from weights and tokens of any dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits in fp32.

        Args:
            input: Tokens.
        """
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


def routers_in_fp32(layers: list[Any], model: nn.Module) -> list[str]:
    """Which of AutoEP's layers have a router that Transformers computes in fp32.

    Upstream symbol: ``deepspeed.moe.ep_router.TokenChoiceTopKRouter`` (0.19.7, 0.19.8), whose gate computes in the
    training dtype. Reason: near-ties between experts fall the other way. Detected by running a router of the model's
    own class in bf16. Expires when AutoEP takes over the source router's precision.

    Args:
        layers: ``MoELayerSpec`` of each layer, from AutoEP's parser.
        model: The Hugging Face model before any layer is replaced.

    Returns:
        Names of the layers.
    """
    sources = {
        layer.moe_module_name: model.get_submodule(f"{layer.moe_module_name}.{layer.router_name}") for layer in layers
    }
    in_fp32 = {kind: _computes_in_fp32(kind, model.config) for kind in {type(source) for source in sources.values()}}
    return [name for name, source in sources.items() if in_fp32[type(source)]]


def compute_in_fp32(model: nn.Module, layers: list[str]) -> None:
    """Have the gates of AutoEP's layers compute in fp32.

    Args:
        model: The Hugging Face model with AutoEP's layers.
        layers: Their names, from :func:`routers_in_fp32`.
    """
    for name in layers:
        gate: Any = model.get_submodule(f"{name}.router.gate")
        if type(gate) is nn.Linear:
            # The module stays, and with it its parameters, hooks and marks.
            gate.__class__ = Fp32Gate


def _computes_in_fp32(router_class: type[nn.Module], config: Any) -> bool:
    def logits_are_fp32(router: Any) -> bool:
        logits = router.to(torch.bfloat16)(torch.zeros(3, WIDTH, dtype=torch.bfloat16))[0]
        return bool(logits.dtype == torch.float32)

    otherwise = "its logits are computed in the training dtype, as DeepSpeed's AutoEP computes them."
    return try_router(router_class, config, logits_are_fp32, otherwise)
