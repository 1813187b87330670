# SPDX-License-Identifier: Apache-2.0
"""Safe master-weight aliasing: a weight partition that equals its master copy is the master copy.

Source: the report "ZeRO-3: reuse the weight partition as the master copy when it already has the master dtype" and its
review.

Upstream symbol: ``DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions``. It has a branch for this, which never runs:
it compares ``tensor.device`` with ``self.device``, a string (0.19.7, 0.19.8). The comparison is made true for the
length of that method. Moving shared storage to the host is the business of :mod:`lightning_zero3.optimizer.moving`.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class MasterAlias(OptimizerPart):
    """Mixin over a Stage-3 optimizer: shares storage between weight partitions and masters where they are equal."""

    switches: Switches
    device: Any
    fp16_partitioned_groups_flat: list[torch.Tensor | None]
    fp32_partitioned_groups_flat: list[torch.Tensor]
    master_weights_and_grads_dtype: torch.dtype

    def aliased_sub_groups(self) -> list[int]:
        """Sub-groups whose weight partition is their master, by identity of the tensors."""
        pairs = zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, strict=False)
        return [index for index, (weights, master) in enumerate(pairs) if weights is master]

    def _create_fp32_partitions(self) -> None:
        if not self.switches.alias_master_weights or self._keeps_two_copies():
            super()._create_fp32_partitions()
            return
        device = self.device
        self.device = torch.device(device)
        try:
            super()._create_fp32_partitions()
        finally:
            self.device = device
        self._check_aliases()

    def _keeps_two_copies(self) -> bool:
        """Whether something moves weights or masters, so that they need storages of their own.

        On the CPU accelerator an offloaded weight sits on the same device as its master, so upstream's comparison
        alone would alias it.
        """
        return any(
            getattr(self, name, False) for name in ("offload_optimizer", "offload_param", "swap_optimizer", "zenflow")
        )

    def _check_aliases(self) -> None:
        """Weights and masters are one tensor exactly where dtype and device agree.

        Raises:
            RuntimeError: They aren't: this DeepSpeed builds masters in a way that isn't known here.
        """
        aliased = set(self.aliased_sub_groups())
        for index, weights in enumerate(self.fp16_partitioned_groups_flat):
            agrees = (
                weights is not None
                and weights.dtype == self.master_weights_and_grads_dtype
                and weights.device == torch.device(self.device)
            )
            if agrees != (index in aliased):
                raise RuntimeError(
                    f"Sub-group {index} {'should' if agrees else 'should not'} share its weights with its master, but "
                    f"this DeepSpeed's _create_fp32_partitions did otherwise. Pass alias_master_weights=False."
                )
