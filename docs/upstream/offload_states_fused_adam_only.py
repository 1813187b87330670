# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``offload_states`` of masters or moments refuses every optimizer but FusedAdam."""

from reproduce import run, zero3

import torch


def check():
    model = torch.nn.Linear(4, 4)
    engine = zero3(model, torch.optim.AdamW(model.parameters()))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    try:
        engine.offload_states()
        engine.reload_states()
    except AssertionError as error:
        return True, f"offload_states with torch.optim.AdamW raises AssertionError: {error}"
    return False, "offload_states and reload_states with torch.optim.AdamW work"


if __name__ == "__main__":
    run(check)
