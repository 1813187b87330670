# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: an optimizer on NVMe, a gradient that begins between two blocks isn't read back from its file."""

from reproduce import CannotTellError, run, weight_of, zero3

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # In one sub-group, in this order: the second one's gradient begins 12 bytes after the buffer.
        self.small = torch.nn.Parameter(torch.zeros(3))
        self.large = torch.nn.Parameter(torch.zeros(2**19))

    def forward(self, x):
        return self.small.sum() + (self.large * x).sum()


def check():
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise CannotTellError("async_io can't be built here: install libaio-dev")
    # The gradient: 1, -1, 1, ... What the buffer held before is other numbers, or these in other places.
    gradient = torch.tensor([1.0, -1.0]).repeat(2**18)
    movements = {}
    for device in ("cpu", "nvme"):
        offload = {"device": device, "nvme_path": ".", "buffer_count": 4, "pin_memory": False}
        engine = zero3(Two(), zero={"offload_optimizer": offload})
        for _ in range(2):
            engine.backward(engine(gradient))
            engine.step()
        movements[device] = round(-float((weight_of(engine.module.large) * gradient).mean()), 4)
    return movements["nvme"] != movements["cpu"], (
        "two steps of SGD, rate 0.1: a weight of 2**19 elements behind one of 3 in its sub-group moves by "
        f"{movements['cpu']} along its gradient with the optimizer on the CPU, by {movements['nvme']} with it on NVMe"
    )


if __name__ == "__main__":
    # The first run compiles the op.
    run(check, seconds=190)
