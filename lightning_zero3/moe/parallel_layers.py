# SPDX-License-Identifier: Apache-2.0
"""Which models in a user's module AutoEP and AutoTP work on, and what their sections of the config say about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_zero3 import ds_config
from lightning_zero3.config import SetupError
from lightning_zero3.moe import expert_parallel, tensor_parallel
from lightning_zero3.topology import Topology


class NothingToVerifyError(SetupError):
    """``verify_parallel`` without expert or tensor parallelism."""


def topology_of(config: Mapping[str, Any], world_size: int) -> Topology:
    """The layout of the ranks that a completed DeepSpeed config asks for.

    Args:
        config: A completed config.
        world_size: Number of ranks.

    Raises:
        SetupError: A size doesn't divide the number of ranks.
    """
    experts = ds_config.expert_parallel_section(config) or {}
    tensors = ds_config.tensor_parallel_section(config) or {}
    return Topology(
        world_size=world_size,
        expert_parallel_size=experts.get("autoep_size", 1),
        tensor_parallel_size=tensors.get("autotp_size", 1),
    )


def targets(
    root: nn.Module, config: Mapping[str, Any], world_size: int
) -> tuple[expert_parallel.ExpertParallelTarget | None, tensor_parallel.TensorParallelTarget | None, dict[str, Any]]:
    """Find the models to replace layers of, and check that their layers can be shared out.

    Args:
        root: The module to train.
        config: A completed config.
        world_size: Number of ranks.

    Returns:
        The model for AutoEP or None, the model for AutoTP or None, and the config with what AutoEP and AutoTP must know
        about them.

    Raises:
        SetupError: A size fits neither ranks, experts, heads nor widths, or there is no layer to share.
    """
    topology = topology_of(config, world_size)
    target, split = None, None
    found: dict[str, Any] = {}
    if (experts := ds_config.expert_parallel_section(config)) is not None:
        target = expert_parallel.find_target(root, experts.get("preset_model"))
        expert_parallel.check_layers(target, experts, topology)
        found["experts"] = expert_parallel.settings(target, experts)
    if (tensors := ds_config.tensor_parallel_section(config)) is not None:
        split = tensor_parallel.find_target(root, tensors, target)
        tensor_parallel.check_layers(split, topology)
        found["partition"] = split.partition
    return target, split, ds_config.with_parallel_layers(config, **found)


def refuse_nothing_to_verify(config: Mapping[str, Any]) -> None:
    """Refuse a comparison where no layer is replaced or split.

    Args:
        config: A completed DeepSpeed config.

    Raises:
        NothingToVerifyError: It asks for neither.
    """
    if ds_config.expert_parallel_section(config) is None and ds_config.tensor_parallel_section(config) is None:
        raise NothingToVerifyError(
            "verify_parallel=True compares layers that expert_parallel_size replaces or tensor_parallel_size (2 or "
            "more) splits with Transformers' own, and neither is asked for. "
            "Set one of them, or leave verify_parallel out."
        )
