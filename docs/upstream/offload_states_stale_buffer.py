"""DeepSpeed: weights offloaded to pinned memory once, and to unpinned memory later, come back as they were at first."""

from reproduce import run, weight_of, zero3

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum


def check():
    engine = zero3(torch.nn.Linear(1, 1, bias=False))
    parameter, lp_params = engine.module.weight, [OffloadStateTypeEnum.lp_params]
    engine.offload_states(include=lp_params, pin_memory=True)
    engine.reload_states()
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    before = float(weight_of(parameter))
    engine.offload_states(include=lp_params, pin_memory=False)
    engine.reload_states()
    after = float(weight_of(parameter))
    return before != after, (
        f"offload pinned, reload, step, offload unpinned, reload: the weight is {before:.4f} before and {after:.4f} "
        "after the second round trip"
    )


if __name__ == "__main__":
    run(check)
