# SPDX-License-Identifier: Apache-2.0
"""A setup's engine, built by this package's own code as a training run builds it, inside a fake world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero3 import ds_config
from lightning_zero3.config import Zero3Options
from lightning_zero3.engine import build_training_engine
from lightning_zero3.moe import parallel_layers
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.sharded_build import sharded_build
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.plan.models import PlannedModel
from lightning_zero3.plan.settings import Setup
from lightning_zero3.precision import check_precision

_RATE = 1e-5  # any


@dataclass(frozen=True)
class Built:
    """What a set-up gives.

    Args:
        engine: DeepSpeed's.
        optimizer: Its Stage-3 optimizer.
        module: What it trains.
        model_parameters: Elements of the whole model, before any layer was replaced.
    """

    engine: Any
    optimizer: Any
    module: nn.Module
    model_parameters: int


class _Root(nn.Module):
    """Holds a model as the recipes' LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None


def build(setup: Setup, planned: PlannedModel) -> Built:
    """Build the model and its engine; the process is in a fake world.

    Args:
        setup: What run.
        planned: Its model.

    Raises:
        SetupError: As in training: sizes that don't divide, models that can't be shared out, precisions.
    """
    config = deepspeed_config(setup)
    root = _Root()
    with sharded_build(config) if setup.zero_init else nullcontext():
        root.model = build_from_config(planned.model_class, planned.config)
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in root.parameters())
    target, split, config = parallel_layers.targets(root, config, setup.world_size)
    with ExitStack() as scope:
        if setup.max_group_size is not None:
            scope.enter_context(_capped_at(setup.max_group_size or None))
        engine, optimizer = build_training_engine(
            root,
            config=config,
            optimizer=None if "optimizer" in config else torch.optim.AdamW(root.parameters(), lr=_RATE),
            lr_scheduler=None,
            local_rank=setup.rank % setup.devices,
            switches=Switches(),
            target=target,
            split=split,
        )
    return Built(engine, optimizer, root, whole)


def deepspeed_config(setup: Setup) -> dict[str, Any]:
    """The completed DeepSpeed config of a setup.

    Offload is left out: it moves what a rank holds, but changes neither partitions nor sub-groups, and would allocate
    host memory here.

    Args:
        setup: What run.
    """
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.micro_batch_size,
        # A Trainer's without gradient_clip_val; DeepSpeed's own would copy gradients to scale them.
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": setup.sub_group_size,
            "reduce_bucket_size": setup.reduce_bucket_size,
            "stage3_param_persistence_threshold": setup.persistence_threshold,
        },
    }
    if setup.precision != "32-true":
        base["bf16"] = {"enabled": True}
    if setup.bf16_masters:
        base["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if setup.optimizer == "deepspeed":
        # torch's AdamW: fused kernels of a GPU have the same groups and states.
        base["optimizer"] = {"type": "AdamW", "params": {"lr": _RATE, "torch_adam": True}}
    options = Zero3Options(
        expert_parallel_size=setup.expert_parallel_size,
        expert_parallel_preset=setup.expert_parallel_preset,
        tensor_parallel_size=setup.tensor_parallel_size if setup.tensor_parallel_size > 1 else None,
    )
    config = ds_config.complete(base, {}, options)
    check_precision(config, setup.precision)
    return config


@contextmanager
def _capped_at(elements: int | None) -> Iterator[None]:
    """Another cap on groups of experts than AutoEP's, for the length of a plan.

    Upstream symbol: the default of ``deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer``
    (0.19.7, 0.19.8), which the engine calls without it. Expires when the config has it.
    """
    from deepspeed.moe import utils

    split = utils.split_params_into_different_moe_groups_for_optimizer
    before = split.__defaults__
    split.__defaults__ = (elements,)
    try:
        yield
    finally:
        split.__defaults__ = before
