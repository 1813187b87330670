# SPDX-License-Identifier: Apache-2.0
"""torch: gloo's threads may ask for Python's lock while the interpreter shuts down, which aborts a finished process."""

import subprocess
import sys

from reproduce import run

PROGRAM = """
import atexit, torch
import torch.distributed as dist

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
held = dist.distributed_c10d._get_default_group()
atexit.register(dist.destroy_process_group)
for _ in range(5000):
    dist.all_reduce(torch.ones(1000), async_op=True)
"""


def check():
    codes = []
    while len(codes) < 6 and not any(codes):  # it is a race
        codes.append(subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False).returncode)
    return any(codes), (
        "a program that ends with collectives in flight, after destroy_process_group, exits with "
        f"{', '.join(map(str, codes))}"
    )


if __name__ == "__main__":
    run(check)
