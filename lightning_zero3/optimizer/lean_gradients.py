# SPDX-License-Identifier: Apache-2.0
"""What happens to each gradient in backward, without what has no effect.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks``, ``__add_grad_to_ipg_bucket``,
``partition_grads`` and ``get_accelerator().device_count`` in ``__avg_scatter_grads`` (0.19.7, 0.19.8). Each gradient
passes through two NVTX ranges and a ``no_grad`` that backward has set already, and is copied or added by itself to the
buffer in which a step's gradients are averaged; on CPUs every reduction starts a process that counts NUMA nodes, for a
number that only quantized gradients need. Part of ``lean_hooks``, detected by ``capabilities.LEAN_HOOKS``. Expires when
upstream batches what it does per gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted


class LeanGradients:
    """Mixin over a Stage-3 optimizer: gradients are copied together, devices counted once."""

    switches: Switches
    _devices: int | None = None
    _add: Callable[..., Any] | None = None

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """As upstream's; the hooks come out of their NVTX ranges."""
        optimizer: Any = self
        super().create_reduce_and_remove_grad_hooks()  # type: ignore[misc]
        if not self.switches.lean_hooks:
            return
        from lightning_zero3.capabilities.probing import unwrapped
        from lightning_zero3.optimizer.rebound import rebound

        self._add = rebound(super()._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket)  # type: ignore[misc]
        for group in optimizer.fp16_groups:
            for parameter in group:
                hooks = parameter._post_accumulate_grad_hooks or {}
                for number, hook in hooks.items():
                    if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                        hooks[number] = unwrapped(hook)

    def _DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(self, param: Any) -> None:
        if self._add is None or torch.is_grad_enabled():
            super()._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(param)  # type: ignore[misc]
        else:
            self._add(self, param)

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, *arguments: Any) -> Any:
        upstream = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads  # type: ignore[misc]
        if not self.switches.lean_hooks:
            return upstream(*arguments)
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if self._devices is None:
            self._devices = accelerator.device_count()
        with substituted(accelerator, "device_count", lambda: self._devices):
            return upstream(*arguments)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """As upstream's, with one call for all gradients where they stay on their device.

        Args:
            params_to_release: Parameters that have been reduced.
            grad_partitions: This rank's part of each one's gradient.
        """
        optimizer: Any = self
        if not self.switches.lean_hooks or optimizer.offload_optimizer or optimizer.zenflow or not grad_partitions:
            return super().partition_grads(params_to_release, grad_partitions)  # type: ignore[misc]
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        rank = optimizer._get_param_partition_rank(params_to_release[0])  # one group's, as is all of a bucket
        everyones = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        buffers, partitions, numbers = [], [], []
        for parameter, partition in zip(params_to_release, grad_partitions, strict=True):
            if rank == 0 or everyones[parameter.ds_id].numel() * rank < parameter.ds_numel:
                buffer = everyones[parameter.ds_id]
                elements = partition.numel()
                buffers.append(buffer if buffer.numel() == elements else buffer.narrow(0, 0, elements))
                partitions.append(partition)
                numbers.append(parameter.ds_id)
                if not accelerator.is_synchronized_device() and parameter.grad is not None:
                    parameter.grad.record_stream(accelerator.current_stream())
            parameter.grad = None
        optimizer._offload_boundary_param_ids.update(numbers)
        if not buffers:
            return buffers
        if optimizer.micro_step_id == 0:
            torch._foreach_copy_(buffers, partitions, non_blocking=True)
        else:
            added = [partition.to(optimizer.gradient_accumulation_dtype) for partition in partitions]
            torch._foreach_add_(buffers, added)
        return buffers
