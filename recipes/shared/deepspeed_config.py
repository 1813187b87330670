# SPDX-License-Identifier: Apache-2.0
"""From a recipe's settings to the DeepSpeed config that its strategy starts from."""

from __future__ import annotations

from typing import Any

from shared.settings import Settings

BETAS = (0.9, 0.95)
# The learning rate of the first step, as a share of the one after warm-up.
WARMUP_START = 0.1


def deepspeed_config(settings: Settings, *, on_gpu: bool) -> dict[str, Any]:
    """What settings ask of DeepSpeed beyond the strategy's own options; all else is DeepSpeed's default.

    Args:
        settings: The run's.
        on_gpu: Whether AdamW is FusedAdam, which DeepSpeed compiles on first use, or torch's.
    """
    zero: dict[str, Any] = {"stage": 3}
    if settings.sub_group_size is not None:
        zero["sub_group_size"] = settings.sub_group_size
    config: dict[str, Any] = {"zero_optimization": zero}
    if settings.bf16_masters:
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if settings.optimizer == "deepspeed":
        config.update(_optimizer(settings, on_gpu))
    return config


def _optimizer(settings: Settings, on_gpu: bool) -> dict[str, Any]:
    """AdamW and its warm-up, with the learning rates of :class:`shared.module.CausalLanguageModel`'s own."""
    rate = settings.learning_rate * (WARMUP_START if settings.warmup_steps else 1)
    parameters = {"lr": rate, "betas": list(BETAS), "weight_decay": settings.weight_decay}
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": parameters if on_gpu else {**parameters, "torch_adam": True}}
    }
    if settings.warmup_steps:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": rate,
                "warmup_max_lr": settings.learning_rate,
                "warmup_num_steps": settings.warmup_steps,
                "warmup_type": "linear",
                # Else the first two steps would have the same rate.
                "last_batch_iteration": 0,
            },
        }
    return config
