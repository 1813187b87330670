# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: AutoTP's process groups stay for the whole process, and the next engine takes them for its own."""

from reproduce import run, zero3

import torch

COLUMN = {"use_default_specs": False, "layer_specs": [{"patterns": [".*first.weight$"], "partition_type": "column"}]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.first(x)


def check():
    split = zero3(Model(), tensor_parallel={"autotp_size": 2, "partition_config": COLUMN})
    split.destroy()
    try:
        zero3(Model())
    except AttributeError as error:
        return True, f"an engine without tensor parallelism, after one with it is destroyed: AttributeError: {error}"
    return False, "an engine without tensor parallelism, after one with it is destroyed, is built"


if __name__ == "__main__":
    run(check, processes=2)
