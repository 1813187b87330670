# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: hpZeRO's process group stays for the whole process, so later engines have secondary partitions too."""

from reproduce import run, zero3

import torch


def check():
    seen = []
    for size in (None, 2, None):
        engine = zero3(torch.nn.Linear(4, 4), zero={} if size is None else {"zero_hpz_partition_size": size})
        engine.backward(engine(torch.ones(1, 4)).sum())
        seen.append(getattr(engine.module.weight, "ds_zero_param_process_group", None) is not None)
        engine.destroy()
    return seen[2], (
        f"engines without, with and, after that one is destroyed, again without zero_hpz_partition_size=2: "
        f"parameters have a secondary group in {seen}"
    )


if __name__ == "__main__":
    run(check, processes=2)
