# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: on a CPU each gradient reduction forks ``numactl`` to count devices (a cost, not a wrong number)."""

import subprocess

from reproduce import run, zero3

import torch


def check():
    layers, forks = 20, []
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    engine = zero3(model, zero={"reduce_bucket_size": 20})
    popen = subprocess.Popen.__init__

    def counted(self, args, *rest, **kwargs):
        forks.append(args)
        popen(self, args, *rest, **kwargs)

    subprocess.Popen.__init__ = counted
    try:
        engine.backward(engine(torch.ones(1, 4)).sum())
    finally:
        subprocess.Popen.__init__ = popen
    return len(forks) > 1, (
        f"{layers} layers, one reduction each: a backward starts {len(forks)} process(es)"
        f"{f', {forks[0]!r}' if forks else ''}"
    )


if __name__ == "__main__":
    run(check)
