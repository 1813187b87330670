# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: without fp16, as on a CPU, ``zero.Init`` passes over the dtype that it is given."""

from reproduce import run

import deepspeed
import torch


def check():
    with deepspeed.zero.Init(dtype=torch.float32):
        layer = torch.nn.Linear(3, 3)
    return layer.weight.dtype != torch.float32, f"zero.Init(dtype=torch.float32): weights are {layer.weight.dtype}"


if __name__ == "__main__":
    run(check)
