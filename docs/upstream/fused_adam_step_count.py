# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: FusedAdam advances ``state["step"]`` of a group's last tensor only.

The first run compiles the op, which takes half a minute.
"""

from reproduce import run

import torch
from deepspeed.ops.adam import FusedAdam


def check():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = FusedAdam(parameters)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
    counts = [int(optimizer.state[p]["step"]) if "step" in optimizer.state[p] else None for p in parameters]
    whole = optimizer.param_groups[0].get("step")
    return len(set(counts)) > 1, f"4 steps of 3 tensors: state['step'] is {counts} (param_groups[0]['step']: {whole})"


if __name__ == "__main__":
    run(check)
