# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``safe_set_full_fp32_param`` raises where the ranks don't divide a parameter's size."""

from reproduce import run, zero3

import deepspeed
import torch


def check():
    engine = zero3(torch.nn.Linear(3, 1, bias=False))
    value = torch.tensor([[1.0, 2.0, 3.0]])
    error = None
    try:
        deepspeed.utils.safe_set_full_fp32_param(engine.module.weight, value)
    except RuntimeError as raised:
        error = raised
    # The other rank's part fits, so it raises nothing, and waits for nobody.
    torch.distributed.barrier()
    errors = [None, None]
    torch.distributed.all_gather_object(errors, error and str(error))
    if any(errors):
        rank, text = next((rank, text) for rank, text in enumerate(errors) if text)
        return True, f"3 elements on 2 ranks: rank {rank} raises RuntimeError: {text}"
    back = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    return not torch.equal(back, value), f"3 elements on 2 ranks: {value.tolist()} set, {back.tolist()} read back"


if __name__ == "__main__":
    run(check, processes=2)
