# SPDX-License-Identifier: Apache-2.0
"""A tiny Hugging Face MoE model trained in one cell of the grid, beside plain Transformers in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import distributed, nn
from torch._dynamo import lookup_backend
from transformers import Qwen3MoeForCausalLM

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.capabilities.grid import Cell
from lightning_zero3.moe import verify
from lightning_zero3.moe.expert_parallel import already_replaced
from lightning_zero3.moe.tensor_parallel import sharded_layers
from lightning_zero3.topology import Topology
from tests.engines import PRECISIONS
from tests.fits import Language, Sentences, fit, optimizer_of
from tests.models import tiny

# The third loss and norm are those of weights that were updated twice.
STEPS = 3


def _config() -> Any:
    # So many tokens that a rank's part of the embedding, 1 MiB in bf16, is worth DeepSpeed's while to swap to a file.
    return tiny("qwen3", num_hidden_layers=2, num_experts=4, vocab_size=2**15)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    # So large an eps leaves updates in proportion to gradients, near enough that a wrong factor shows.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.01)


def batch(lane: int, step: int) -> torch.Tensor:
    """Token ids of a data-parallel rank in a step.

    Of 400 seeds the one with which no token's second and third choice of expert come near each other in any step: where
    two nearly tie, bf16 chooses the one here and the other there, and gradients are another function's.
    """
    return torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(44_000 + 10 * step + lane))


class InCell(Language):
    """Builds, checkpoints and compiles its model as a cell says, and keeps what it saw."""

    def __init__(self, cell: Cell, lane: int, backend: str, loss_scale: float) -> None:
        super().__init__(None)
        self.cell, self.lane, self.backend, self.loss_scale = cell, lane, backend, loss_scale
        self.norms: list[float] = []
        self.graphs = self.forwards = 0
        self.partitioned_at_birth = False
        self.computed_in = ""
        if cell.built == "whole":
            self._build()

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self._build()

    def _build(self) -> None:
        torch.manual_seed(5)
        model: Any = Qwen3MoeForCausalLM(_config()).train()
        self.partitioned_at_birth = hasattr(model.lm_head.weight, "ds_id")
        if self.cell.checkpointing != "none":
            kwargs = {"use_reentrant": self.cell.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        self.some_odd_name = model
        if self.cell.compiled:
            model.compile(backend=self._counted)

    def _counted(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return lookup_backend(self.backend)(graph, inputs)

    def on_train_start(self) -> None:
        # A hook would break the graph that it is in.
        if not self.cell.compiled:
            model: Any = self.some_odd_name
            model.model.layers[0].input_layernorm.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def training_step(self, _: Any, batch_idx: int) -> torch.Tensor:
        ids = batch(self.lane, batch_idx)
        model: Any = self.some_odd_name
        out = model(input_ids=ids, labels=ids, use_cache=False)
        self.computed_in = str(out.logits.dtype)
        self.losses.append(out.loss.item())
        return out.loss * self.loss_scale

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(float(self.trainer.strategy.model.get_global_grad_norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.parameters())


def options(cell: Cell, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the strategy and of the Trainer, as a user would write them, with several sub-groups."""
    strategy: dict[str, Any] = {}
    if cell.experts > 1:
        strategy["expert_parallel_size"] = cell.experts
    if cell.tensors > 1:
        strategy["tensor_parallel_size"] = cell.tensors
    if cell.precision == "autocast":
        strategy["config"] = {**PRECISIONS["autocast"], "zero_optimization": {"stage": 3, "sub_group_size": 5000}}
    else:
        strategy["sub_group_size"] = 5000
    if cell.offload != "none":
        strategy |= {"offload_optimizer": True, "pin_memory": False}
    if cell.offload in ("parameters", "nvme"):
        strategy["offload_parameters"] = True
    if cell.offload == "nvme":
        strategy |= {
            "remote_device": "nvme",
            "offload_params_device": "nvme",
            "offload_optimizer_device": "nvme",
            "nvme_path": folder,
            "params_buffer_size": 2**21,
            "params_buffer_count": 6,
            "optimizer_buffer_count": 6,
        }
    return strategy, {"precision": "32-true" if cell.precision == "autocast" else cell.precision}


def reference(precision: str, lanes: int) -> dict[str, Any]:
    """Plain Transformers in one process, in a precision's arithmetic: losses per lane, gradient norms, weights."""
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(_config()).train()
    if precision.startswith("bf16"):
        model.to(torch.bfloat16)
    weights = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in weights.items()}
    start = {name: master.detach().clone() for name, master in masters.items()}
    optimizer = _optimizer(masters.values())
    losses: list[list[float]] = [[] for _ in range(lanes)]
    norms = []
    for step in range(STEPS):
        for lane in range(lanes):
            ids = batch(lane, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / lanes).backward()
            losses[lane].append(loss.item())
        for name, weight in weights.items():
            masters[name].grad = torch.zeros_like(masters[name]) if weight.grad is None else weight.grad.float()
            weight.grad = None
        # In fp64, as DeepSpeed's: an fp32 sum over a million squares is off by 1e-5.
        norms.append(float(torch.stack([master.grad.double().norm() for master in masters.values()]).norm()))
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(masters[name])
    return {"losses": losses, "norms": norms, "start": start, "weights": masters}


@dataclass(frozen=True)
class Outcome:
    """What a fit in a cell came to, on one rank.

    Args:
        loss: Largest difference of a loss from plain Transformers'.
        norm: Largest difference of a gradient norm, relative to it.
        weights: Largest difference of a weight's movement over all steps, relative to the movement, in norms.
        signs: What shows that the cell is what it says.
    """

    loss: float
    norm: float
    weights: float
    signs: dict[str, Any]


def signs_of(cell: Cell) -> dict[str, Any]:
    """What :attr:`Outcome.signs` must be."""
    return {
        "computed in": "torch.float32" if cell.precision == "32-true" else "torch.bfloat16",
        "weights in": "torch.bfloat16" if cell.precision.startswith("bf16") else "torch.float32",
        "masters in": "torch.float32",
        "offload": (cell.offload != "none", cell.offload in ("parameters", "nvme"), cell.offload == "nvme"),
        "AutoEP": cell.experts > 1,
        "AutoTP": cell.tensors > 1,
        "partitioned at birth": cell.built == "configure_model",
        "compiled": cell.compiled,
        "swapped": cell.offload == "nvme",
        # Twice in each step where activations are computed anew; not counted in compiled code.
        "forwards": 0 if cell.compiled else STEPS * (1 if cell.checkpointing == "none" else 2),
    }


def run_cell(cell: Cell, folder: str, backend: str = "eager", loss_scale: float = 1.0) -> Outcome:
    """Train in the cell, on this rank, and compare with plain Transformers.

    Args:
        cell: Which.
        folder: Where states may be swapped to.
        backend: ``torch.compile``'s.
        loss_scale: Other than 1 to train wrongly on purpose.
    """
    layout = Topology(distributed.get_world_size(), cell.experts, cell.tensors)
    lane = layout.data_parallel_rank(distributed.get_rank())
    strategy, trainer_options = options(cell, folder)
    torch._dynamo.reset()
    module = InCell(cell, lane, backend, loss_scale)
    trainer = fit(module, Sentences(64), Zero3FastStrategy(**strategy), steps=STEPS, **trainer_options)
    optimizer = optimizer_of(trainer)
    expected = reference(cell.precision, layout.data_parallel_size)
    ours = verify.as_transformers_names(
        {
            name.removeprefix("some_odd_name."): safe_get_full_fp32_param(parameter).detach().float().clone()
            for name, parameter in module.named_parameters()
        },
        expected["weights"],
    )
    errors = []
    for name, value in expected["weights"].items():
        mine, rank = ours[name], distributed.get_rank()
        end, start = (
            verify.part_of(name, each.detach(), mine.shape, layout, rank) for each in (value, expected["start"][name])
        )
        errors.append(float((mine - end).norm() / (end - start).norm()))
    return Outcome(
        loss=max(abs(a - b) for a, b in zip(module.losses, expected["losses"][lane], strict=True)),
        norm=max(abs(a - b) / b for a, b in zip(module.norms, expected["norms"], strict=True)),
        weights=max(errors),
        signs={
            "computed in": module.computed_in,
            "weights in": str(optimizer.fp16_groups[0][0].ds_tensor.dtype),
            "masters in": str(optimizer.fp32_partitioned_groups_flat[0].dtype),
            "offload": tuple(
                bool(getattr(optimizer, name)) for name in ("offload_optimizer", "offload_param", "swap_optimizer")
            ),
            "AutoEP": already_replaced(module),
            "AutoTP": sharded_layers(module) > 0,
            "partitioned at birth": module.partitioned_at_birth,
            "compiled": module.graphs > 0,
            "swapped": any(path.stat().st_size for path in Path(folder).rglob("*.swp")),
            "forwards": module.forwards,
        },
    )
