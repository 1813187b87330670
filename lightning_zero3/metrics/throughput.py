# SPDX-License-Identifier: Apache-2.0
"""How many tokens a batch holds, in sequences of which lengths, and what that is per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from lightning_zero3.metrics import names


def tokens_in(batch: Any) -> int | None:
    """Count the tokens of a batch of token ids.

    Args:
        batch: A mapping with ``input_ids`` (a tensor or a list of them), a tensor of an integer dtype, or a sequence
            whose first entry is one.

    Returns:
        The number of elements of the token ids (padding counts), or None if the batch isn't of these forms.

    >>> tokens_in({"input_ids": torch.zeros(2, 8, dtype=torch.long)}), tokens_in(torch.zeros(2, 8))
    (16, None)
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        # Samples of different lengths, not padded into one tensor.
        counts = [tokens_in(sample) for sample in (ids if isinstance(ids, list | tuple) else [ids])]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None
    if isinstance(batch, list | tuple) and batch:
        return tokens_in(batch[0])
    if isinstance(batch, torch.Tensor) and not batch.is_floating_point() and batch.dtype != torch.bool:
        return batch.numel()
    return None


def lengths_in(batch: Any) -> list[int] | None:
    """Lengths of the sequences in a batch of token ids.

    Args:
        batch: As for :func:`tokens_in`.

    Returns:
        For ids in a tensor, its last dimension for each of its rows; for ids in a list, each sample's. None if the
        batch isn't of these forms. A row of several packed documents counts as one sequence.

    >>> lengths_in({"input_ids": torch.zeros(2, 8, dtype=torch.long)}), lengths_in({"pixels": torch.zeros(2, 8)})
    ([8, 8], None)
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        by_sample = [lengths_in(sample) for sample in (ids if isinstance(ids, list | tuple) else [ids])]
        known = [lengths for lengths in by_sample if lengths is not None]
        return list(chain.from_iterable(known)) if known and len(known) == len(by_sample) else None
    if isinstance(batch, list | tuple) and batch:
        return lengths_in(batch[0])
    if tokens_in(batch) is not None and batch.ndim:
        return [batch.shape[-1]] * (batch.numel() // batch.shape[-1] if batch.shape[-1] else 0)
    return None


def rates(tokens: float, flops: float, peak: float, *, step_ms: float, world_size: int) -> dict[str, float]:
    """Tokens per second and model FLOPs utilisation of one step.

    Args:
        tokens: Of all ranks; NaN where they aren't known.
        flops: That the step needed, of all ranks; NaN where they aren't known.
        peak: FLOP/s of all devices; NaN where it isn't known.
        step_ms: The slowest rank's whole step, in ms.
        world_size: Number of ranks.

    Returns:
        Metric name → value, of what is known.

    >>> rates(500, 1e12, 4e12, step_ms=500, world_size=4)[names.MFU]
    0.5
    """
    seconds = step_ms / 1e3
    values = {
        names.TOKENS_PER_SECOND: tokens / seconds,
        names.DEVICE_TOKENS_PER_SECOND: tokens / seconds / world_size,
        names.MFU: flops / seconds / peak if peak else math.nan,
    }
    return {name: value for name, value in values.items() if not math.isnan(value)}
