# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``safe_set_*`` functions, with weights and gathered copies that follow the master at once.

Upstream symbols: ``set_full_hp_param``, ``set_local_hp_param``, ``set_fp32_grad_for_param`` of
``DeepSpeedZeroOptimizer_Stage3``, which ``deepspeed.utils.safe_set_*`` call (0.19.7, 0.19.8). They write the master
alone: weights follow with the next step, a persistent parameter's gathered copy too, and where weights and masters are
one storage that stale copy can be written back over the master. The full ones fail where a parameter's size isn't
divisible by the number of ranks. Expires when upstream writes weights as well.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.edits import CONTEXT_DEPTH
from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class SettersReachWeights(OptimizerPart):
    """Mixin over a Stage-3 optimizer: what is set on a master is set on the weights."""

    switches: Switches

    @torch.no_grad()
    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set a whole master, or a whole moment, of a parameter; call it on every rank.

        Args:
            value: As many elements as the parameter has, in any shape.
            param: The parameter.
            optim_state_key: A key of the optimizer's state (``"exp_avg"``), or None for the master.

        Raises:
            ValueError: ``value`` has another number of elements, or a frozen parameter has no such state.
        """
        if not self.switches.keep_edits:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        self._set(self._own_part(value, param), param, optim_state_key)
        if optim_state_key is None and _is_gathered(param):
            param.data.copy_(value.reshape(param.ds_shape))
            self.remember_gathered(param)

    @torch.no_grad()
    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set this rank's partition of a master or moment; call it on every rank.

        A gathered copy of the parameter is given up, since no rank knows the others' values, and the next use gathers
        it again; where it is in use, it is gathered at once.

        Args:
            value: As many elements as this rank's partition has, padding included.
            param: The parameter.
            optim_state_key: A key of the optimizer's state, or None for the master.

        Raises:
            ValueError: ``value`` has another number of elements, or a frozen parameter has no such state.
        """
        if not self.switches.keep_edits:
            super().set_local_hp_param(value, param, optim_state_key)
            return
        if value.numel() != param.partition_numel():
            raise ValueError(f"A partition of {param.partition_numel()} elements was to be set to {value.numel()}.")
        gathered = optim_state_key is None and _is_gathered(param)
        in_use = bool(param.ds_active_sub_modules) or getattr(param, CONTEXT_DEPTH, 0) > 0
        if gathered and not in_use:
            param.partition()
        self._set(value.flatten(), param, optim_state_key)
        if gathered and in_use:
            param.data.copy_(self._fp32_state_allgather(param, param.ds_tensor))
            self.remember_gathered(param)

    @torch.no_grad()
    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set a whole gradient of a parameter; call it on every rank.

        Args:
            value: As many elements as the parameter has, in any shape.
            param: The parameter.

        Raises:
            ValueError: ``value`` has another number of elements.
        """
        if not self.switches.keep_edits:
            super().set_fp32_grad_for_param(value, param)
        elif param.requires_grad:
            self.set_local_grad_for_param(self._own_part(value, param), param)

    def _set(self, own: torch.Tensor, param: Any, optim_state_key: str | None) -> None:
        """Write this rank's part of a master and of the weights, or of a moment."""
        if self.is_optimized(param):
            with self.master_of(param, optim_state_key) as master:
                master.copy_(own)
        elif optim_state_key is not None:
            raise ValueError(
                f"The optimizer has no {optim_state_key} of a parameter that was frozen when it was built: shape "
                f"{tuple(param.ds_shape)}."
            )
        if optim_state_key is None:
            if param.ds_tensor.numel() == param.partition_numel():  # weights on NVMe follow with the next step
                param.ds_tensor.copy_(own)
            # hpZeRO's second copy; upstream drops it in the same way after a step.
            param.ds_secondary_tensor = None

    def _own_part(self, value: torch.Tensor, param: Any) -> torch.Tensor:
        """This rank's part of a full value, with zeros where the partition is padding."""
        if value.numel() != param.ds_numel:
            raise ValueError(f"A parameter of {param.ds_numel} elements was to be set to {value.numel()} of them.")
        size, real = param.partition_numel(), self.real_elements(param)
        start = size * self._get_param_partition_rank(param)
        own = value.flatten()[start : start + real]
        return torch.nn.functional.pad(own, (0, size - real))


def _is_gathered(param: Any) -> bool:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return bool(param.ds_status == ZeroParamStatus.AVAILABLE)
