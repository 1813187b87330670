# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed 0.19.8: under ``torch_autocast`` to fp16 an overflow never lowers the scale, so all later steps overflow.

The engine skips the step before its GradScaler hears of it.
"""

from reproduce import run, zero3

import torch


def check():
    model = torch.nn.Linear(1, 1)
    engine = zero3(model, torch_autocast={"enabled": True, "dtype": "float16"})
    scaler, scales = engine.optimizer.torch_autocast_gradscaler, []
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 1)).sum() * 1e38)
        engine.step()
        scales.append(scaler.get_scale())
    return scales[-1] == 2.0**16, (
        f"4 steps that overflow: the scale, 65536 at first, is {[f'{s:g}' for s in scales]}, skipped_steps "
        f"{engine.skipped_steps}"
    )


if __name__ == "__main__":
    run(check)
