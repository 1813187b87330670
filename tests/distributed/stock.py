# SPDX-License-Identifier: Apache-2.0
"""Lightning's own ``DeepSpeedStrategy``, able to run on a CPU and with nothing else changed."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class StockOnCPU(DeepSpeedStrategy):
    """Stock, less its refusal of CPUs, and with a device index that the engine can compare."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)
