# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: with DeepSpeed, ``optimizer.step()`` runs past the engine, whose counts stand still."""

from reproduce import run

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy less its refusal of CPUs."""

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def _setup_distributed(self):
        self._set_world_ranks()

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


def check():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3},
    }
    fabric = Fabric(accelerator="cpu", devices=1, strategy=OnCPU(config=config))
    fabric.launch()
    layer = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    steps = fabric.strategy._deepspeed_engine.global_steps
    return steps != 3, f"3 times backward and optimizer.step(): the engine's global_steps is {steps}"


if __name__ == "__main__":
    run(check)
