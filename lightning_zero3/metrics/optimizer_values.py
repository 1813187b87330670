# SPDX-License-Identifier: Apache-2.0
"""What the optimizer's step had to do with: learning rate, gradient norm, sub-groups."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.metrics import names


def read_learning_rate(optimizers: list[Any]) -> dict[str, float | torch.Tensor]:
    """The learning rate of the first optimizer's first parameter group, to be read before schedulers move it.

    Args:
        optimizers: The Trainer's.

    Returns:
        Metric name → rate, or a tensor where the optimizer holds one; empty without an optimizer.
    """
    groups = getattr(optimizers[0], "param_groups", []) if optimizers else []
    rate = groups[0].get("lr") if groups else None
    if isinstance(rate, torch.Tensor):
        return {names.LEARNING_RATE: rate.detach().clone()}
    return {} if rate is None else {names.LEARNING_RATE: float(rate)}


def read_optimizer(engine: Any, *, skipped: bool) -> dict[str, float | torch.Tensor]:
    """Gradient norm of the last step, and number of sub-groups.

    Upstream: ``DeepSpeedEngine.get_global_grad_norm``, ``DeepSpeedZeroOptimizer_Stage3.fp16_groups``.

    Args:
        engine: A DeepSpeed engine, or any other module.
        skipped: Whether the last step was skipped; its norm is no number, or an older step's.

    Returns:
        Metric name → value; a norm on the device stays there.
    """
    values: dict[str, float | torch.Tensor] = {}
    norm = getattr(engine, "get_global_grad_norm", lambda: None)()
    if norm is not None and not skipped:
        values[names.GRAD_NORM] = norm
    groups = getattr(getattr(engine, "optimizer", None), "fp16_groups", None)
    if groups is not None:
        values[names.SUB_GROUPS] = float(len(groups))
    return values
