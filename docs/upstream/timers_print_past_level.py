# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``wall_clock_breakdown`` prints its lines to stdout whatever the logging level, and can't be quiet."""

import contextlib
import io
import logging

from reproduce import run, zero3

import torch


def check():
    engine = zero3(torch.nn.Linear(1, 1), wall_clock_breakdown=True)
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    lines = [line for line in printed.getvalue().splitlines() if "time (ms)" in line]
    return bool(lines), f"logging level CRITICAL: {len(lines)} lines on stdout in one micro-step: {str(lines[:1])[:90]}"


if __name__ == "__main__":
    run(check)
