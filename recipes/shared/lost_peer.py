# SPDX-License-Identifier: Apache-2.0
"""What a rank says when another one has ended or can't be reached."""

from __future__ import annotations

import torch


class LostPeerError(RuntimeError):
    """Another process of this run has ended, or didn't answer in time."""


# Gloo's errors are plain RuntimeErrors that name its source files; NCCL's and the stores' have classes of their own.
_GLOO = ("gloo/transport", "gloo\\transport", "Connection closed by peer", "Timed out waiting")


def is_one(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes from a collective or a store that lost its other side.

    Args:
        error: Any.
    """
    while error is not None:
        if isinstance(error, torch.distributed.DistError):
            return True
        if isinstance(error, RuntimeError) and any(part in str(error) for part in _GLOO):
            return True
        error = error.__cause__ or error.__context__
    return False


def explained(error: BaseException, *, rank: int, step: int, timeout_seconds: int, saved: bool) -> LostPeerError:
    """The error for a person.

    Args:
        error: What torch said.
        rank: This rank.
        step: Optimizer steps taken.
        timeout_seconds: How long a rank waits for others.
        saved: Whether this run saves checkpoints.
    """
    remedy = (
        "Start all nodes again with --resume auto to go on from the last complete checkpoint."
        if saved
        else "This run saved no checkpoint (--checkpoint_every N), so it begins anew."
    )
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return LostPeerError(
        f"Rank {rank}, after step {step}: another process of this run has ended, or hasn't answered within "
        f"{timeout_seconds} seconds (--timeout_seconds). Look for the first error in the logs of the other nodes. "
        f"{remedy}\ntorch says: {first_line}"
    )
