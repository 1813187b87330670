# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model in pieces of its sequence, so that the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IGNORED = -100


class TiledHead(nn.Linear):
    """An ``lm_head`` that gives the loss where it is given labels. See :func:`tile_head`."""

    tiles: int

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or the mean loss of predicting each next label.

        Tiling is DeepSpeed's: backward computes a tile's logits again, and tells ZeRO that the weight's gradient is
        complete at the last one. (Its ``TiledFusedLogitsLoss`` saves that second computation by doing backward inside
        forward. Under Stage 3 the gradient is then cleared before it is reduced, and it doesn't know of the loss's
        division under gradient accumulation.)

        Args:
            hidden: Shape [samples, sequence, width].
            labels: Shape [samples, sequence]; those of -100 aren't predicted.
        """
        if labels is None:
            return super().forward(hidden)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

        # As Transformers does: tokens up to n predict token n + 1, and the last one predicts nothing.
        targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        total: torch.Tensor = sequence_tiled_compute(
            self._sum_of_losses,
            seqlen=hidden.shape[1],
            shards=self.tiles,
            kwargs_to_shard={"hidden": hidden, "targets": targets},
            kwargs_to_pass={},
            grad_requiring_tensor_key="hidden",
            compute_params=[self.weight],
            output_unshard_dimension=0,
            output_reduction="sum",
        )
        return total / (targets != IGNORED).sum()

    def _sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden, self.weight, self.bias).float()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def tile_head(model: Any, tiles: int) -> None:
    """Let a model's ``lm_head`` compute the loss in tiles, for :func:`tiled_loss`.

    The module stays the same object and gets a subclass, as torch's own FSDP does it: names, weights, partitions and
    DeepSpeed's hooks are untouched. All tiles are one call of it, so that its weight is gathered once in forward and
    once in backward, not once for each tile.

    Args:
        model: A Hugging Face causal language model with an ``lm_head`` that is an ``nn.Linear``.
        tiles: Pieces.
    """
    assert type(model.lm_head) is nn.Linear
    head: Any = model.lm_head
    head.__class__ = TiledHead
    head.tiles = tiles


def tiled_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch, of a model that :func:`tile_head` was called on. Auxiliary losses aren't part of it.

    Args:
        model: The model.
        batch: ``input_ids`` and ``labels``, of shape [samples, sequence].
    """
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    loss: torch.Tensor = model.lm_head(hidden, batch["labels"])
    return loss
