# SPDX-License-Identifier: Apache-2.0
"""Balancing without an auxiliary loss: a router's correction bias moves by a fixed amount after each optimizer step.

DeepSeek-V3 Technical Report (arXiv:2412.19437), section 2.1.2, after Wang et al. (arXiv:2408.15664): the bias is added
to an expert's score for the choice of the top k only, not for the weight of its output. At the end of each step, an
expert that got more than the mean number of tokens has its bias lowered by the update speed, one that got fewer has it
raised::

    bias[e] += speed * sign(mean(load) - load[e])

with the loads of the whole batch: all micro-batches of all data-parallel ranks. GLM-4.5 and MiniMax's models are
trained in the same way; Transformers has the bias (``e_score_correction_bias``) but never moves it.

Upstream symbol: ``load_balance_coeff`` of the ``expert_parallel`` section, which AutoEP refuses for every model
(0.19.7, 0.19.8). What is counted, and by what: :mod:`lightning_zero3.expert_counts`; a router that returns no choice is
refused in its first forward. Expires when DeepSpeed moves the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import distributed, nn

from lightning_zero3.config import SetupError
from lightning_zero3.expert_counts import ExpertCounts
from lightning_zero3.moe.hugging_face import is_model, model_type

# Transformers' name for it in every model that has one.
BIAS = "e_score_correction_bias"
# In what Lightning saves next to DeepSpeed's own states.
SAVED = "lightning_zero3_router_counts"


class NoCorrectionBiasError(SetupError):
    """Routers were to be balanced by their correction biases, but there are none that could be moved."""


def find_routers(root: nn.Module) -> dict[str, nn.Module]:
    """Find the routers that hold a correction bias, Transformers' own or AutoEP's.

    Args:
        root: Any module.

    Returns:
        Dotted name → router, in the model's order.

    Raises:
        NoCorrectionBiasError: There is none, or a bias is a parameter, which an optimizer may move.
    """
    routers = {path: module for path, module in root.named_modules() if module._buffers.get(BIAS) is not None}
    parameters = [path for path, module in root.named_modules() if module._parameters.get(BIAS) is not None]
    if parameters:
        raise NoCorrectionBiasError(
            f"router_bias_update_speed is set, but {parameters[0]}.{BIAS} is a parameter, partitioned by ZeRO Stage 3; "
            "only a buffer can be moved after each step. Leave router_bias_update_speed out."
        )
    if not routers:
        raise NoCorrectionBiasError(
            f"router_bias_update_speed is set, but no router in {_described(root)} has a correction bias (a buffer "
            f"{BIAS}, as in DeepSeek-V3, GLM-4.5 and MiniMax). Leave it out; Mixtral's and Qwen's models are balanced "
            "by an auxiliary loss: set output_router_logits=True in the model's config."
        )
    return routers


def _described(root: nn.Module) -> str:
    held = next(filter(is_model, root.modules()), None)
    if held is None:
        return type(root).__name__
    return f"{type(root).__name__} ({type(held).__name__}, model_type={model_type(held)!r})"


class RouterBiases:
    """Counts the tokens of each expert during one fit, and moves the biases after each optimizer step.

    A token counts as :class:`~lightning_zero3.expert_counts.ExpertCounts` says. Routers below which nothing is trained
    get no backward, and their biases stay.

    Args:
        engine: A DeepSpeed engine, with AutoEP's layers in place if there are any.
        speed: How far a bias moves in one step.

    Raises:
        NoCorrectionBiasError: See :func:`find_routers`.
    """

    def __init__(self, engine: Any, speed: float) -> None:
        self._engine = engine
        self._speed = speed
        self._steps = engine.global_steps
        self._moved = False
        routers = find_routers(engine.module)
        self._routers = list(routers.values())
        device = self._biases()[0].device
        sizes = {path: bias.numel() for path, bias in zip(routers, self._biases(), strict=True)}
        self._counter = ExpertCounts(routers, sizes, device, no_choice=_refuse)
        self._counts = self._counter.counts
        self._sizes = torch.tensor(self._counter.sizes, device=device)
        self._layer_of = torch.arange(len(sizes), device=device).repeat_interleave(self._sizes)
        self._begin_alike()

    def _biases(self) -> list[torch.Tensor]:
        # Asked each time: ``module.to`` and assignments put another tensor in a buffer's place.
        return [getattr(router, BIAS) for router in self._routers]

    def _begin_alike(self) -> None:
        """In fp32 on every rank, whatever it was cast to, and with rank 0's values: updates are alike from there on."""
        for bias in self._biases():
            bias.data = bias.data.float()
        if distributed.get_world_size() > 1:
            packed = torch.cat(self._biases())
            distributed.broadcast(packed, src=0)
            torch._foreach_copy_(self._biases(), list(packed.split(self._sizes.tolist())))

    def step_ended(self) -> None:
        """After a call of ``engine.step``: move the biases if that was a step, forget the counts if it was skipped."""
        if self._engine.global_steps == self._steps:
            return
        self._steps = self._engine.global_steps
        if self._engine.was_step_applied():
            self._move()
        self._counts.zero_()

    def _move(self) -> None:
        loads = self._over_ranks()
        if not self._moved:
            self._moved = True
            if not loads.any():
                rank_zero_warn(
                    "router_bias_update_speed is set, but no backward ran through a router in the first step, so no "
                    "correction bias has moved. Are the weights below all routers frozen?"
                )
        totals = torch.zeros_like(self._sizes).index_add_(0, self._layer_of, loads)
        # sign(mean - load), without a division.
        directions = torch.sign(totals[self._layer_of] - loads * self._sizes[self._layer_of])
        moves = (directions.float() * self._speed).split(self._sizes.tolist())
        torch._foreach_add_(self._biases(), list(moves))

    def _over_ranks(self) -> torch.Tensor:
        # Over all ranks: tensor-parallel peers count the same tokens, which multiplies loads and mean alike.
        loads = self._counts.clone()
        if distributed.get_world_size() > 1:
            distributed.all_reduce(loads)
        return loads

    def saved_state(self) -> torch.Tensor:
        """What a checkpoint needs beside the biases, which are in the model's state: a step's counts so far."""
        return self._over_ranks().cpu()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that has been loaded into the engine.

        Args:
            state: The checkpoint, perhaps of a run that moved no biases.
        """
        self._steps = self._engine.global_steps
        self._counts.zero_()
        counts = state.get(SAVED)
        # They were added up over ranks, and will be once more.
        if counts is not None and distributed.get_rank() == 0:
            self._counts.copy_(counts)

    def close(self) -> None:
        """Stop counting."""
        self._counter.close()


def _refuse(path: str, router: nn.Module) -> None:
    raise NoCorrectionBiasError(
        f"router_bias_update_speed is set, but {path} ({type(router).__name__}) doesn't return the experts "
        "that it has chosen, so their tokens can't be counted. Leave router_bias_update_speed out."
    )
