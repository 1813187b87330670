# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ZeRO-3 calls hundreds of functions around a module that needs and releases nothing (a cost)."""

import sys

from reproduce import run, zero3

import torch


def calls_in(function):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def calls_of(layers):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), *(torch.nn.Tanh() for _ in range(layers)))
    engine = zero3(module)

    def passes():
        engine.backward(engine(torch.ones(1, 4)).sum())

    for _ in range(3):
        passes()
        engine.step()
    return calls_in(passes)


def check():
    each = (calls_of(40) - calls_of(20)) / 20
    return each > 150, f"each module without parameters: {each:.0f} calls of functions in a forward and backward"


if __name__ == "__main__":
    run(check)
