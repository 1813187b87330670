# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines for functions that run on ranks: ours and stock's, built by the same call.

What differs between the two is the optimizer's class and nothing else, so that a difference in numbers is its doing.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch

from lightning_zero3.config import Zero3Options
from lightning_zero3.engine import build_training_engine
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted
from tests.fits import Pairs, Regression

BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 with fp32 masters": {"bf16": {"enabled": True}},
    "bf16 masters": {"bf16": BF16_MASTERS},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


class Trainable(Regression):
    """Its forward is its training step, as Lightning makes it."""

    def forward(self, batch: Any, step: int) -> torch.Tensor:
        return self.training_step(batch, step)


def build(
    model: torch.nn.Module | None = None,
    *,
    stock: bool = False,
    optimizer: Any = None,
    sub_group_size: int = 100,
    zero: dict[str, Any] | None = None,
    target: Any = None,
    options: Zero3Options | None = None,
    **config: Any,
) -> Any:
    """An engine around a model, with our optimizer or with upstream's; one given as a dict is the config's entry."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

    model = Trainable() if model is None else model
    options = options or Zero3Options()
    full = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_size,
            "stage3_param_persistence_threshold": 20,
            "reduce_bucket_size": 100_000,
            **(zero or {}),
        },
        **config,
    }
    if isinstance(optimizer, dict):
        full["optimizer"], optimizer = optimizer, None
    elif optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    with substituted(
        FastStage3Optimizer,
        "with_switches",
        (lambda _: DeepSpeedZeroOptimizer_Stage3) if stock else FastStage3Optimizer.with_switches,
    ):
        engine, built = build_training_engine(
            model,
            config=copy.deepcopy(full),
            optimizer=optimizer,
            lr_scheduler=None,
            local_rank=torch.distributed.get_rank(),
            switches=Switches.from_options(options),
            leaf_modules=not options.stock_semantics,
            target=target,
        )
    assert isinstance(built, FastStage3Optimizer) is not stock
    return engine


def async_io_works() -> bool:
    """Whether DeepSpeed's op that swaps to files can be built here."""
    builder = importlib.import_module("deepspeed.ops.op_builder.async_io").AsyncIOBuilder()
    return builder.is_compatible(verbose=False)


def batch_of(engine: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples of the regression data; other ones on every rank and step."""
    data, rank = Pairs(), torch.distributed.get_rank()
    start = 2 * (step * torch.distributed.get_world_size() + rank) % 60
    dtype = next(engine.module.parameters()).dtype
    return data.x[start : start + 2].to(dtype), data.y[start : start + 2]


def micro_step(engine: Any, step: int, scale: float = 1.0) -> float:
    """Forward, backward and step of the regression model."""
    loss = engine(batch_of(engine, step), step)
    engine.backward(loss * scale)
    engine.step()
    return loss.item()


def norm_of(engine: Any) -> float:
    """The gradient norm that the engine reports for the last step."""
    return float(engine.get_global_grad_norm())


def assert_aliased(optimizer: Any) -> None:
    """Every flat is its master, and all of them and the ``ds_tensor``s view the one buffer, in sub-group order."""
    assert optimizer.aliased_sub_groups() == list(range(len(optimizer.fp16_groups)))
    address, size = optimizer.lp_param_buffer.data_ptr(), optimizer.lp_param_buffer.element_size()
    offset = 0
    for index, group in enumerate(optimizer.fp16_groups):
        assert optimizer.fp32_partitioned_groups_flat[index].data_ptr() == address + offset * size
        for parameter in group:
            assert parameter.ds_tensor.data_ptr() == address + offset * size
            offset += parameter.partition_numel()
    assert offset == optimizer.lp_param_buffer.numel()


def assert_agreement(engine: Any) -> None:
    """Masters, weights and whatever parameters lie around gathered hold the same numbers, on this rank."""
    optimizer = engine.optimizer
    for index, group in enumerate(optimizer.fp16_groups):
        master, offset = optimizer.fp32_partitioned_groups_flat[index].detach(), 0
        for parameter in group:
            size = parameter.partition_numel()
            start = size * optimizer._get_param_partition_rank(parameter)
            real = max(0, min(size, parameter.ds_numel - start))
            weights = parameter.ds_tensor[:real]
            assert torch.equal(weights, master[offset : offset + real].to(weights.dtype)), "weights and masters"
            if parameter.data.numel() == parameter.ds_numel:
                gathered = parameter.data.view(-1)[start : start + real]
                assert torch.equal(gathered, weights), "gathered and weights"
            offset += size
