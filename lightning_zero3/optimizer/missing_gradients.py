# SPDX-License-Identifier: Apache-2.0
"""A parameter that got no gradient this step has a gradient of zero, and one unfrozen too late is refused.

Upstream symbols: ``partition_grads`` and ``independent_gradient_partition_epilogue`` of
``DeepSpeedZeroOptimizer_Stage3`` (0.19.7, 0.19.8). Gradient partitions live in one buffer that outlives the step, and
only a reduction writes to it. A parameter that no micro-step of this step has used is therefore updated with an older
step's gradient, and one that only a later micro-step uses adds to it. Stages 0 to 2 use zero in both cases. Parameters
that were frozen when the optimizer was built have no place in it; upstream says nothing if they are unfrozen later.
Expires when upstream clears what wasn't written; then nothing here finds anything to do.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class UnfrozenParameterError(RuntimeError):
    """A parameter wants to be trained that the optimizer has no place for."""


class MissingGradients(OptimizerPart):
    """Mixin over a Stage-3 optimizer: zeroes gradients that no reduction of this step has written."""

    switches: Switches
    module: torch.nn.Module
    micro_step_id: int
    offload_optimizer: bool
    fp16_groups: list[list[torch.nn.Parameter]]
    # ds_ids of parameters reduced since the last step or clear, and in this backward.
    _reduced: set[int]
    _reduced_now: set[int]
    _frozen: list[tuple[str, torch.nn.Parameter]]

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        self._reduced, self._reduced_now = set(), set()
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """As upstream's, after which the next backward is a step's first.

        Args:
            set_to_none: As upstream's.
        """
        self._reduced = set()
        return super().zero_grad(set_to_none)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """As upstream's.

        Args:
            params_to_release: Parameters that have been reduced.
            grad_partitions: This rank's part of each one's gradient.
        """
        ids = [parameter.ds_id for parameter in params_to_release]
        self._reduced.update(ids)
        self._reduced_now.update(ids)
        return super().partition_grads(params_to_release, grad_partitions)

    def independent_gradient_partition_epilogue(self) -> None:
        """As upstream's, which ends each backward; then see to the parameters that it hasn't reached."""
        super().independent_gradient_partition_epilogue()
        reduced_now, self._reduced_now = self._reduced_now, set()
        if not self.switches.zero_missing_gradients:
            return
        if self.micro_step_id == 0 and not self._reached_all(self._reduced):
            self._zero_all_but(self._reduced)
        boundary = self.offload_optimizer and self.is_gradient_accumulation_boundary()
        if boundary and not self._reached_all(reduced_now):
            self._offload_all_but(reduced_now)

    def _pre_step(self) -> None:
        if self.switches.refuse_unfrozen:
            late = [name for name, parameter in self._frozen if parameter.requires_grad]
            if late:
                raise UnfrozenParameterError(
                    f"{late[0]}{f' and {len(late) - 1} more parameters' if len(late) > 1 else ''} had "
                    "requires_grad=False when the optimizer was built and has True now. ZeRO Stage 3 has no place for "
                    "its gradient, and wouldn't train it. Build the optimizer with requires_grad=True and freeze it "
                    "afterwards, for example in on_train_start, until it is to be trained."
                )
        self._reduced = set()
        super()._pre_step()

    def _reached_all(self, reduced: set[int]) -> bool:
        return len(reduced) >= sum(map(len, self.fp16_groups))

    def _zero_all_but(self, reduced: set[int]) -> None:
        for ds_id, partition in self._gradient_partitions().items():
            if ds_id not in reduced:
                partition.zero_()

    def _offload_all_but(self, reduced: set[int]) -> None:
        """Send the gradients of earlier micro-steps, or zeros, to the host, as upstream does for those of the last."""
        optimizer: Any = self
        partitions = self._gradient_partitions()
        gradients: dict[int, Any] = {}
        offsets: dict[int, Any] = {}
        for parameter in (p for group in self.fp16_groups for p in group):
            if parameter.ds_id not in reduced:  # type: ignore[attr-defined]
                partition = partitions[parameter.ds_id]  # type: ignore[attr-defined]
                optimizer._offload_grad_partition_at_boundary(parameter, partition, gradients, offsets)
        optimizer._swap_out_offload_fp32_gradients(gradients, offsets)

    def _gradient_partitions(self) -> dict[int, torch.Tensor]:
        # ds_id → this rank's partition of the gradient, a slice of one buffer; upstream's name for it is private.
        partitions: dict[int, torch.Tensor] = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return partitions
