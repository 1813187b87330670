# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: groups that it makes itself wait torch's default time, whatever time-out it was given."""

from reproduce import run

import torch
import torch.distributed as dist
from deepspeed.utils import groups

TIMEOUT_SECONDS = 60


def seconds(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def check():
    groups._create_expert_and_data_parallel(1)
    made = groups._get_expert_parallel_group("ep_size_1")
    given, own = seconds(dist.group.WORLD), seconds(made)
    return own != given, (
        f"init_distributed(timeout={TIMEOUT_SECONDS} s): the group of all ranks waits {given:.0f} s, "
        f"a group of experts {own:.0f} s"
    )


if __name__ == "__main__":
    run(check, timeout=TIMEOUT_SECONDS)
