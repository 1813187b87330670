"""The loss of a language model in pieces of its sequence, so that the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


class TiledHead(nn.Linear):
    """An ``lm_head`` that gives the loss where it is given labels. See :func:`tile_head`."""

    tiles: int

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or the mean loss of predicting each next label.

        Args:
            hidden: Shape [samples, sequence, width].
            labels: Shape [samples, sequence]; those of -100 aren't predicted.
        """
        if labels is None:
            return super().forward(hidden)
        # As Transformers does: tokens up to n predict token n, and the last one predicts nothing.
        targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        losses = [
            # Forward keeps a tile's input, and backward computes its logits again.
            checkpoint(self._sum_of_losses, tile, tile_targets, use_reentrant=False)
            for tile, tile_targets in zip(rows.chunk(self.tiles), targets.chunk(self.tiles), strict=True)
        ]
        return torch.stack(losses).sum() / (targets != IGNORED).sum()

    def _sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden, self.weight, self.bias).float()
        return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def tile_head(model: Any, tiles: int) -> None:
    """Let a model's ``lm_head`` compute the loss in tiles, for :func:`tiled_loss`.

    The module stays the same object and gets a subclass, as torch's own FSDP does it: names, weights, partitions and
    DeepSpeed's hooks are untouched. Its weight is gathered once for all tiles, since they are computed in one call, and
    autograd adds their gradients up before anybody sees them.

    Args:
        model: A Hugging Face causal language model with an ``lm_head`` that is an ``nn.Linear``.
        tiles: Pieces.
    """
    assert type(model.lm_head) is nn.Linear
    model.lm_head.__class__ = TiledHead
    model.lm_head.tiles = tiles


def tiled_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch, of a model that :func:`tile_head` was called on.

    Args:
        model: The model.
        batch: ``input_ids`` and ``labels``, of shape [samples, sequence].
    """
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    loss: torch.Tensor = model.lm_head(hidden, batch["labels"])
    return loss
