# SPDX-License-Identifier: Apache-2.0
"""Gradients add up from one backward to the next until a step or ``zero_grad``, as those of a plain module do.

Upstream symbols: ``clear_backward_seen_flag``, ``_epilogue_ran_this_backward``, ``zero_grad``, ``_pre_step``,
``finalize_gradient_accumulation_boundary``, ``grad_partitions_flat_buffer``, ``_rigid_state_dict`` and
``_rigid_load_state_dict`` of ``DeepSpeedZeroOptimizer_Stage3`` (0.19.7, 0.19.8). Upstream counts micro-steps by
forwards of the engine, so of several backwards in one ``training_step`` the last one overwrites the others; the
gradients of a step that isn't complete are missing from checkpoints; and a step right after ``zero_grad`` applies what
was cleared. Expires when upstream does all three.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches

# In the optimizer's part of a checkpoint, which each rank writes for itself. Upstream reads its own names only.
PARTIAL_GRADIENTS = "lightning_zero3_partial_gradients"


class AccumulateGradients(OptimizerPart):
    """Mixin over a Stage-3 optimizer: knows whether there are gradients, adds them up and keeps them in checkpoints."""

    switches: Switches
    offload_optimizer: bool
    micro_step_id: int
    overflow: bool
    grad_partitions_flat_buffer: torch.Tensor
    fp16_groups: list[list[torch.nn.Parameter]]
    _reduced: set[int]
    _epilogue_ran_this_backward: bool
    _global_grad_norm: Any
    # Whether a backward has ended since the last step or clear.
    _has_gradients = False

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no step has used and nothing has cleared."""
        return self._has_gradients

    def begin_backward(self) -> None:
        """Have the next backward add to those before it, also where no forward of the engine came in between."""
        if self.switches.accumulate_backwards and self._epilogue_ran_this_backward:
            self.clear_backward_seen_flag()

    def independent_gradient_partition_epilogue(self) -> None:
        """As upstream's, which ends each backward."""
        super().independent_gradient_partition_epilogue()
        self._has_gradients = True

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """As upstream's.

        Args:
            set_to_none: As upstream's.
        """
        self._has_gradients = False
        return super().zero_grad(set_to_none)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """As upstream's, which sends an offloaded optimizer its gradients; then those that no backward has reached."""
        super().finalize_gradient_accumulation_boundary()
        optimizer: Any = self
        if self.offload_optimizer and self._has_gradients and not optimizer._reached_all(self._reduced):
            optimizer._offload_all_but(self._reduced)

    def step(self, closure: Any = None) -> Any:
        """As upstream's; without gradients nothing is updated, as torch's optimizers leave what has none.

        Args:
            closure: As upstream's.
        """
        if self.switches.accumulate_backwards and not self._has_gradients:
            self.overflow = False
            self._global_grad_norm = 0.0
            return None
        return super().step(closure)

    def _pre_step(self) -> None:
        self._has_gradients = False
        super()._pre_step()

    def _rigid_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super()._rigid_state_dict()
        if self.switches.keep_partial_gradients and self._has_gradients:
            state[PARTIAL_GRADIENTS] = {
                "gradients": self.grad_partitions_flat_buffer.detach().to("cpu", copy=True),
                "reached": [parameter.ds_id in self._reduced for parameter in self._optimized()],
            }
        return state

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> Any:
        result = super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        partial = state_dict.get(PARTIAL_GRADIENTS) if self.switches.keep_partial_gradients else None
        if partial is not None and load_optimizer_states:
            self._restore_partial(**partial)
        return result

    def _restore_partial(self, gradients: torch.Tensor, reached: list[bool]) -> None:
        parameters = self._optimized()
        if gradients.shape != self.grad_partitions_flat_buffer.shape or len(reached) != len(parameters):
            return  # the strategy warns where gradients were saved and none have arrived
        self.grad_partitions_flat_buffer.copy_(gradients)
        self._reduced = {p.ds_id for p, was_reached in zip(parameters, reached, strict=True) if was_reached}
        # As after the backward that the checkpoint followed: the next one adds.
        self.micro_step_id, self._epilogue_ran_this_backward = 0, True
        self._has_gradients = True

    def _optimized(self) -> list[Any]:
        return [parameter for group in self.fp16_groups for parameter in group]
