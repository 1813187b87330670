# SPDX-License-Identifier: Apache-2.0
"""The loss in pieces of the sequence, as the recipes compute it: logits exist for one piece at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint


def tiled_loss(model: Any, ids: torch.Tensor, tiles: int) -> torch.Tensor:
    """A model's loss with its ``lm_head`` called once, for all pieces, so that its weight is gathered once.

    Args:
        model: A Hugging Face causal language model.
        ids: Tokens, which are the labels too.
        tiles: Pieces.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    head = model.lm_head
    # An attribute of the instance, so that DeepSpeed's hooks run around it.
    head.forward = partial(_in_pieces, head, tiles)
    try:
        loss: torch.Tensor = head(hidden, ids)
    finally:
        del head.forward
    return loss


def _in_pieces(head: Any, tiles: int, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    def of_piece(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(rows, head.weight, head.bias).float(), targets, reduction="sum")

    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    pieces = zip(rows.chunk(tiles), targets.chunk(tiles), strict=True)
    return torch.stack([checkpoint(of_piece, *piece, use_reentrant=False) for piece in pieces]).sum()
