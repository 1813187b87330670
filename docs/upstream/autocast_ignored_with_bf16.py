# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``torch_autocast`` together with ``bf16.enabled`` silently trains plain bf16."""

import logging

from reproduce import run, zero3

import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 4), {}

    def forward(self, x):
        self.seen = {"autocast": torch.is_autocast_enabled("cpu"), "weight": self.layer.weight.dtype}
        return self.layer(x.to(self.layer.weight.dtype))


def check():
    from deepspeed.utils import logger

    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    autocast = {"enabled": True, "dtype": "bfloat16"}
    seen = []
    for config in ({}, {"bf16": {"enabled": True}}):
        said.clear()
        engine = zero3(Layer(), torch_autocast=autocast, **config)
        engine(torch.ones(1, 4))
        seen.append(engine.module.seen)
    warned = any("autocast" in message and "bf16" in message for message in said)
    return seen[1]["weight"] == torch.bfloat16 and not warned, (
        f"torch_autocast alone: weights are {seen[0]['weight']}, autocast {seen[0]['autocast']}; with bf16.enabled: "
        f"{seen[1]['weight']}, autocast {seen[1]['autocast']}, and {'a' if warned else 'no'} warning"
    )


if __name__ == "__main__":
    run(check)
