# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed and torch: ZeRO-3's autograd functions have their signature inspected at every call (a cost)."""

import inspect

from reproduce import run, zero3

import torch


def check():
    layers, calls = 20, 0
    engine = zero3(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))))
    signature = inspect.signature

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return signature(*args, **kwargs)

    engine(torch.ones(1, 4))
    inspect.signature = counted
    try:
        engine(torch.ones(1, 4))
    finally:
        inspect.signature = signature
    return calls > 0, f"a forward of {layers} layers calls inspect.signature {calls} times"


if __name__ == "__main__":
    run(check)
