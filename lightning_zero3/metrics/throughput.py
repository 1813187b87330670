"""How many tokens a batch holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


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
