# SPDX-License-Identifier: Apache-2.0
"""torch: ``torch.optim.SGD(fused=True)`` on a CPU doesn't update bfloat16 parameters, and gets their momentum wrong."""

from reproduce import run

import torch

STEPS, ELEMENTS = 4, 67


def after_steps(dtype, fused):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.rand(ELEMENTS).to(dtype))
    began = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=0.125, momentum=0.5, fused=fused)
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = int((parameter.detach() != began).sum())
    return parameter.detach().float(), optimizer.state[parameter]["momentum_buffer"].float(), moved


def apart(a, b):
    # Undefined numbers may be NaN.
    return float((a - b).abs().nan_to_num(nan=torch.inf).max())


def check():
    seen, present = [], False
    for dtype in (torch.float32, torch.bfloat16):
        (weight, momentum, moved), (expected, expected_momentum, _) = (
            after_steps(dtype, True),
            after_steps(dtype, False),
        )
        present = present or apart(weight, expected) > 0.1
        seen.append(
            f"{str(dtype).removeprefix('torch.')}: {moved} of {ELEMENTS} elements moved, up to "
            f"{apart(weight, expected):.2g} from fused=False, momenta up to {apart(momentum, expected_momentum):.2g}"
        )
    return present, f"after {STEPS} steps with fused=True {'; '.join(seen)}"


if __name__ == "__main__":
    run(check)
