# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: forwards of a validation count as the next training micro-step's forward in ``wall_clock_breakdown``."""

import time

from reproduce import run, zero3

import torch


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        if not self.training:
            time.sleep(0.2)
        return self.layer(x)


def check():
    engine, times = zero3(Slow(), wall_clock_breakdown=True), []
    for validates in (False, False, True):
        if validates:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(1, 1))
            engine.train()
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        times.append(engine.get_wall_clock_timers().get("fwd_microstep", 0.0))
    return times[2] > 150, (
        f"forward time of a micro-step {times[1]:.1f} ms; of one after a validation whose forward takes 200 ms "
        f"{times[2]:.1f} ms"
    )


if __name__ == "__main__":
    run(check)
