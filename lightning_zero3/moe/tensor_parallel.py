# SPDX-License-Identifier: Apache-2.0
"""AutoTP pointed at the Hugging Face model inside a user's module: which of its layers are split, and how.

Hugging Face's own plans contain styles that DeepSpeed refuses, and without a plan it guesses from names. So each model
type has explicit layer specifications here, bound to the path of the model: another model beside it stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe import adapter_slices
from lightning_zero3.moe.hugging_face import find_models, model_type
from lightning_zero3.moe.presets import UnsupportedModelError
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology

# Heads are shared out: queries, keys and values by output, what joins the heads by input. Norms of single heads stay
# whole, but each rank has only its heads' part of their gradient, so the parts are summed.
ATTENTION: tuple[dict[str, Any], ...] = (
    {"patterns": [r"self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r"self_attn\.o_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r"self_attn\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
)
# Dense layers and shared experts. AutoEP calls Qwen's `shared_expert` `shared_experts`.
MLP: tuple[dict[str, Any], ...] = (
    {"patterns": [r"(mlp|shared_experts?)\.(gate|up)_proj\.weight$"], "partition_type": "column"},
    {
        "patterns": [r"(mlp|shared_experts?)\.gate_up_proj\.weight$"],
        "partition_type": "column",
        "shape": [2, -1],
        "partition_dim": 0,
    },
    {"patterns": [r"(mlp|shared_experts?)\.down_proj\.weight$"], "partition_type": "row"},
)

_PLANS: dict[str, tuple[dict[str, Any], ...]] = {
    "glm4_moe": ATTENTION + MLP,
    # Its sparse attention asks the config for the number of heads when it masks, so attention stays whole.
    "minimax_m3_vl_text": MLP,
    "mixtral": ATTENTION,
    # Linear attention stays whole.
    "qwen3_5_moe_text": ATTENTION + MLP,
    "qwen3_moe": ATTENTION + MLP,
}


class NoShardedLayerError(SetupError):
    """Tensor parallelism was asked for, but no layer would be split."""


@dataclass(frozen=True)
class TensorParallelTarget:
    """The Hugging Face model whose layers AutoTP splits.

    Args:
        path: Its dotted name inside the root module, empty for the root itself.
        module: The model.
        partition: AutoTP's ``partition_config``, or None where the user's own config has one.
    """

    path: str
    module: nn.Module
    partition: Mapping[str, Any] | None


def register_tensor_parallel(model_type: str, layers: Iterable[Mapping[str, Any]]) -> None:
    """Say how the layers of a Hugging Face ``model_type`` are split.

    Args:
        model_type: ``config.model_type`` of the Hugging Face model.
        layers: DeepSpeed's ``layer_specs``; :data:`ATTENTION` and :data:`MLP` are the usual ones. Their patterns are
            matched with the end of a parameter's name, inside the model.

    >>> register_tensor_parallel("my_moe", [*ATTENTION, *MLP])
    >>> len(partition_config("my_moe", "net")["layer_specs"])
    6
    """
    _PLANS[model_type] = tuple(dict(layer) for layer in layers)


def partition_config(model_type: str, path: str) -> dict[str, Any]:
    """AutoTP's ``partition_config`` for a model.

    Upstream symbol: ``AutoTP._replace_autoep_shared_experts`` (0.19.7, 0.19.8), which is told the last two parts of an
    AutoEP layer's name only, so a pattern that begins with the model's path never fits its shared experts. Both names
    are given. Expires when it is told the whole name.

    Args:
        model_type: ``config.model_type`` of the Hugging Face model.
        path: The model's dotted name inside the root module.

    Raises:
        UnsupportedModelError: Nobody has said how such a model is split.
    """
    if model_type not in _PLANS:
        raise UnsupportedModelError(
            f"It isn't known how to split model_type={model_type!r} for tensor_parallel_size. Known are: "
            f"{', '.join(sorted(_PLANS))}. Say it with lightning_zero3.moe.tensor_parallel.register_tensor_parallel, "
            "or by tensor_parallel.partition_config in the DeepSpeed config; else leave tensor_parallel_size out."
        )
    whole_name = (re.escape(path) + r"\." if path else "") + r"(?:.*\.)?"
    prefix = rf"(?:{whole_name}|\d+\.[^.]+\.(?=shared_experts\.))"
    specs = [{**layer, "patterns": [prefix + pattern for pattern in layer["patterns"]]} for layer in _PLANS[model_type]]
    return {"use_default_specs": False, "layer_specs": specs}


def find_target(root: nn.Module, section: Mapping[str, Any], expert_parallel: Any = None) -> TensorParallelTarget:
    """Find the Hugging Face model to split inside a module.

    Args:
        root: Any module, usually a LightningModule.
        section: The ``tensor_parallel`` section of the DeepSpeed config.
        expert_parallel: The model for AutoEP, which is then the one that is meant, or None.

    Raises:
        UnsupportedModelError: There is no model that can be split, or there are several.
        NoShardedLayerError: There is no Hugging Face model inside.
    """
    theirs = bool(section.get("partition_config") or section.get("preset_model"))
    if expert_parallel is not None:
        found = [(expert_parallel.path, expert_parallel.module)]
    else:
        found, others = find_models(root, lambda module: theirs or model_type(module) in _PLANS)
        if not found and others:
            partition_config(model_type(others[0][1]), others[0][0])  # says what is missing
    if not found:
        raise NoShardedLayerError(
            f"tensor_parallel_size is set, but {type(root).__name__} holds no Hugging Face model (a module whose "
            "`config` has a `model_type`). Build the model in the LightningModule's __init__ or configure_model."
        )
    if len(found) > 1:
        raise UnsupportedModelError(
            "tensor_parallel_size is set, and there are several models: "
            + ", ".join(f"{path} ({model_type(module)})" for path, module in found)
            + ". Say which layers are split by tensor_parallel.partition_config in the DeepSpeed config, or keep the "
            "others out of this LightningModule."
        )
    path, module = found[0]
    partition = (
        None if theirs else adapter_slices.partition_of(partition_config(model_type(module), path), path, module)
    )
    return TensorParallelTarget(path, module, partition)


def check_layers(target: TensorParallelTarget, topology: Topology) -> int:
    """Check that every layer that would be split can be, before any process group exists.

    Args:
        target: What :func:`find_target` found.
        topology: The run's layout.

    Returns:
        The number of weights that will be split; 0 where the user's own ``partition_config`` says which.

    Raises:
        NoShardedLayerError: There is none.
        SetupError: Heads or a layer's width aren't divisible by the tensor parallel size.
        AdapterError: PEFT's adapters are of a kind that can't be split.
    """
    adapter_slices.check(target.path, target.module, target.partition)
    if target.partition is None:
        return 0
    where, split = f"{target.path or 'the model'} ({type(target.module).__name__})", 0
    for name, parameter in target.module.named_parameters():
        full_name = f"{target.path}.{name}" if target.path else name
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        for spec in target.partition["layer_specs"]:
            if spec["partition_type"] == "skip" or not any(re.match(p, full_name) for p in spec["patterns"]):
                continue
            split += 1
            if "self_attn" in name:
                _check_heads(target.module, where, topology)
            width = shape[0] // spec["shape"][0] if "shape" in spec else shape[spec["partition_type"] == "row"]
            topology.require_divides(width, f"the width of {full_name}")
            break
    if not split:
        raise NoShardedLayerError(
            f"tensor_parallel_size={topology.tensor_parallel_size}, but none of the layers of {where} is one that "
            f"model_type={model_type(target.module)!r} is known to have. Its children are: "
            f"{', '.join(name for name, _ in target.module.named_children()) or 'none'}."
        )
    return split


def _check_heads(module: nn.Module, where: str, topology: Topology) -> None:
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(module.config, attribute, None)
        if isinstance(heads, int):
            topology.require_divides(heads, f"{attribute} of {where}")


def already_split(root: nn.Module) -> bool:
    """Whether AutoTP's layers are in place, from an earlier engine."""
    return bool(getattr(root, "ds_autotp_parsed", False))


def sharded_layers(root: nn.Module) -> int:
    """How many of AutoTP's layers there are."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    return sum(isinstance(module, TensorParallel_Layer) for module in root.modules())


@contextmanager
def auto_tp_on(target: TensorParallelTarget) -> Iterator[None]:
    """Give AutoTP the head counts of the model that it splits, for the length of ``deepspeed.initialize``.

    Upstream symbol: ``deepspeed.module_inject.tp_shard.AutoTPMeta.from_model_config`` (0.19.7, 0.19.8). Reason: it is
    given the root module's config, which under a LightningModule is missing or is something else, and then sizes heads'
    slices by it. Detected by the substitution itself: a missing name raises. Expires when AutoTP takes a nested model.
    """
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    upstream: Callable[..., Any] = AutoTPMeta.from_model_config

    def from_target(_: Any, *arguments: Any, **named: Any) -> Any:
        return upstream(target.module.config, *arguments, **named)

    with (
        substituted(AutoTPMeta, "from_model_config", staticmethod(from_target)),
        adapter_slices.walked_into(target.module),
    ):
        yield


def start_alike(root: nn.Module) -> None:
    """Give all ranks rank 0's weights and buffers, where they are whole.

    DeepSpeed does so within data-parallel groups only, so tensor-parallel peers that drew different values would train
    slices of different models. Weights that ``zero.Init`` has partitioned are one model already.

    Args:
        root: A module that no engine has yet.
    """
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    with torch.no_grad():
        for tensor in (*root.parameters(), *root.buffers()):
            if not hasattr(tensor, "ds_id"):
                # NCCL takes what is on the device only; a model may have been built on the host.
                sent = tensor.to(device)
                torch.distributed.broadcast(sent, src=0)
                if sent is not tensor:
                    tensor.copy_(sent)


def forget_other_layouts(tensor_parallel_size: int) -> None:
    """Drop the process groups of an earlier engine with another tensor parallel size, so that new ones are made.

    Upstream symbols: ``deepspeed.utils.groups.mpu`` and the groups beside it (0.19.7, 0.19.8), which outlive their
    engine. Reason: the next engine takes them for its own: without tensor parallelism it fails with "'NoneType' object
    has no attribute 'get_model_parallel_rank'", with another size it splits by the old one. An engine that is still in
    use must not be trained further. Expires when the engine's ``destroy`` drops them.

    Args:
        tensor_parallel_size: Of the engine that is built next; 1 without tensor parallelism.
    """
    from deepspeed.utils import groups

    made = groups._TENSOR_MODEL_PARALLEL_GROUP
    if made is None or torch.distributed.get_world_size(made) == tensor_parallel_size:
        return
    if groups.mpu is groups:
        groups.mpu = None
    for name in (
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
        "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    ):
        setattr(groups, name, None)
