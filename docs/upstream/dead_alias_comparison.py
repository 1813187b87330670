# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: stage 3 in fp32 keeps each weight twice; the branch that would share them compares a device with a string.

What it costs is 4 bytes per parameter.
"""

from reproduce import run, zero3

import torch


def check():
    optimizer = zero3(torch.nn.Linear(100, 100, bias=False)).optimizer
    weights, masters = optimizer.fp16_partitioned_groups_flat[0], optimizer.fp32_partitioned_groups_flat[0]
    shared = weights.data_ptr() == masters.data_ptr()
    return not shared, (
        f"fp32, {weights.numel()} parameters: weights and masters are equal ({torch.equal(weights, masters)}), lie on "
        f"the same device, and take {weights.nbytes if shared else weights.nbytes + masters.nbytes} bytes; "
        f"weights.device == optimizer.device is {weights.device == optimizer.device} "
        f"({weights.device!r}, {optimizer.device!r})"
    )


if __name__ == "__main__":
    run(check)
