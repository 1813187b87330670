# SPDX-License-Identifier: Apache-2.0
"""Models with PEFT's adapters, trained by a Trainer and by plain PyTorch, for functions that run on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.topology import Topology
from tests.fits import Language
from tests.models import FAMILIES, build, tiny
from tests.parity import batch_of

# LoraConfig's arguments, by what they adapt. With GLM, Mixtral and Qwen3-MoE, PEFT takes `all-linear` for attention,
# experts and routers; with the others for attention and shared or dense layers.
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "router": {"target_modules": ["v_proj"], "target_parameters": ["gate.weight"]},
    # Of GLM's and Qwen3-MoE's, PEFT can't name them beside the experts but by a pattern over whole names.
    "shared": {"target_modules": ["gate_proj", "up_proj", "gate_up_proj", "down_proj"]},
}
SETTINGS = {"zero_optimization": {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 40}}
RATE = 0.1
IDS = torch.arange(24).reshape(2, 12) * 5 % 64


def adapted(family: str, kind: str, seed: int = 9, **overrides: Any) -> Any:
    """A tiny model with adapters that add something from the start.

    Args:
        family: Of :data:`tests.models.FAMILIES`.
        kind: Of :data:`KINDS`.
        seed: Of the adapters' values; the model's are the same.
        **overrides: Fields of the model's config.
    """
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(tiny(family, **overrides)), LoraConfig(r=4, lora_alpha=8, **KINDS[kind]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif parameter.requires_grad:
                parameter.mul_(1 + 0.01 * (seed - 9))
    return model


class Adapted(Language):
    """Trains adapters with plain SGD and momentum: a gradient of another scale gives other losses.

    Args:
        model: With adapters, or None.
        lane: The data-parallel rank.
    """

    def __init__(self, model: nn.Module | None, lane: int) -> None:
        super().__init__(model, RATE)
        self.batch = batch_of(lane)
        self.logits = torch.empty(0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.some_odd_name(input_ids=self.batch, labels=self.batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.some_odd_name(input_ids=ids, use_cache=False).logits

    def on_train_end(self) -> None:
        self.eval()
        with torch.no_grad():
            self.logits = self.trainer.strategy.model(IDS).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE, momentum=0.9)


def plain_losses(model: nn.Module, lanes: int, steps: int) -> list[list[float]]:
    """What plain PyTorch and PEFT give in one process.

    Args:
        model: With adapters; it is trained.
        lanes: Number of data-parallel ranks.
        steps: Number of steps.

    Returns:
        Each step's losses of all lanes.
    """
    optimizer, losses = sgd(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        of_lanes = []
        for lane in range(lanes):
            batch = batch_of(lane)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # type: ignore[operator]
            of_lanes.append(loss.item())
            (loss / lanes).backward()
        optimizer.step()
        losses.append(of_lanes)
    return losses


def strategy_of(sizes: tuple[int | None, int | None], **options: Any) -> Zero3FastStrategy:
    """The strategy under test.

    Args:
        sizes: Expert and tensor parallel size.
        **options: Others of the strategy's.
    """
    experts, slices = sizes
    return Zero3FastStrategy(SETTINGS, expert_parallel_size=experts, tensor_parallel_size=slices, **options)


def layout_of(sizes: tuple[int | None, int | None]) -> tuple[Topology, int]:
    """The layout of the ranks, and this rank's data-parallel one."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    layout = Topology(world, sizes[0] or 1, sizes[1] or 1)
    return layout, layout.data_parallel_rank(rank)


def from_pretrained(family: str, folder: str) -> Any:
    """The model of a Hugging Face folder, as Transformers reads it."""
    return FAMILIES[family][1].from_pretrained(folder, attn_implementation="eager").eval()
