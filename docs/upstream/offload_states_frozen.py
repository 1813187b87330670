# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``offload_states`` of weights takes the order of the module for the order of the buffer.

While they are offloaded, weights are wrong if parameter groups come in another order than the module's; with frozen
parameters the call raises after it has bound the buffer to the host.
"""

from reproduce import run, weight_of, zero3

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum


def check():
    lp_params = [OffloadStateTypeEnum.lp_params]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    groups = [{"params": [model[1].weight]}, {"params": [model[0].weight]}]
    engine = zero3(model, torch.optim.SGD(groups, lr=0.1))
    before = weight_of(model[0].weight)
    engine.offload_states(include=lp_params, pin_memory=False)
    difference = float((weight_of(model[0].weight) - before).abs().max())

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    engine = zero3(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    error = None
    try:
        engine.offload_states(include=lp_params, pin_memory=False)
    except Exception as raised:
        error = raised
    frozen = f"raises {type(error).__name__}: {error}" if error else "works"
    return difference > 0 or error is not None, (
        f"two groups in reverse order: a weight differs by {difference:.4f} while offloaded; "
        f"with a frozen parameter offload_states {frozen}"
    )


if __name__ == "__main__":
    run(check)
