# SPDX-License-Identifier: Apache-2.0
"""The strategy's time-out for every process group of a fit, not only for the one of all ranks.

DeepSpeed makes groups of its own (ranks that share experts, their replicas, tensor-parallel peers) and passes no
time-out, so torch gives them its default: 30 minutes for gloo, 10 for NCCL. A rank whose peer's host has lost its power
waits that long in an expert all-to-all, whatever ``Zero3FastStrategy(timeout=...)`` says.

Upstream symbols: ``torch.distributed.distributed_c10d._world.pg_map`` and ``_set_pg_timeout`` (torch 2.8 to 2.13; there
is no public list of groups, nor a way to change one). Without them there is a warning, and the defaults stay. Expires
when DeepSpeed's groups inherit the time-out.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.constants import default_pg_timeout


def groups() -> list[Any]:
    """The process groups that this rank is a member of; none where torch doesn't tell."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def set_for_new(before: list[Any], timeout: timedelta | None) -> None:
    """Give a time-out to groups that are new; at the default one, or None, they keep theirs.

    Args:
        before: What :func:`groups` returned earlier; these stay as they are.
        timeout: The strategy's.
    """
    if timeout is None or timeout == default_pg_timeout:
        return
    try:
        for group in groups():
            if group not in before:
                torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
    except (AttributeError, RuntimeError, ValueError) as error:
        rank_zero_warn(f"timeout={timeout} isn't set for DeepSpeed's own process groups, which keep torch's: {error}")
