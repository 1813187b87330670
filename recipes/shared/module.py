# SPDX-License-Identifier: Apache-2.0
"""The LightningModule that all recipes train: a Hugging Face causal language model, built from its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero3.metrics import names
from lightning_zero3.moe.build import build_from_config
from shared.deepspeed_config import BETAS, WARMUP_START
from shared.tiled_loss import tile_head, tiled_loss


class CausalLanguageModel(pl.LightningModule):
    """Next-token prediction with AdamW.

    Args:
        model_class: A Hugging Face class whose forward takes ``input_ids`` and ``labels`` and returns a ``loss``.
        config: Its config. The model is built in ``configure_model``, partitioned from the start.
        learning_rate: AdamW's, after warm-up.
        weight_decay: AdamW's.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        recompute_activations: Keep only each layer's input in forward and compute the rest again in backward.
        loss_tiles: Pieces in which logits and loss are computed.
        seed: For the initial weights; the same on all ranks.
        weights: A folder of safetensors that the weights are taken from, in place of drawn ones.
        skip_layers: Layers of that folder that the model doesn't have, by number.
    """

    def __init__(
        self,
        model_class: type[Any],
        config: Any,
        *,
        learning_rate: float,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        recompute_activations: bool = False,
        loss_tiles: int = 1,
        seed: int = 0,
        weights: str | None = None,
        skip_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.model_class = model_class
        self.config = config
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.recompute_activations = recompute_activations
        self.loss_tiles = loss_tiles
        self.seed = seed
        self.weights = weights
        self.skip_layers = tuple(skip_layers)
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model inside ``deepspeed.zero.Init``, which Lightning has opened around this hook."""
        if self.model is not None:
            return
        torch.manual_seed(self.seed)
        skipped = [rf"\.layers\.({'|'.join(map(str, self.skip_layers))})\."] if self.skip_layers else []
        self.model = build_from_config(self.model_class, self.config, self.weights, allow_unexpected=skipped)
        if self.recompute_activations:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.loss_tiles > 1:
            tile_head(self.model, self.loss_tiles)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """One micro-step's loss, in nats per token."""
        loss: torch.Tensor = (
            tiled_loss(self.model, batch) if self.loss_tiles > 1 else self.model(**batch, use_cache=False).loss
        )
        self.log(names.LOSS, loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, and a linear warm-up; not called where the DeepSpeed config names an optimizer."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=BETAS, weight_decay=self.weight_decay
        )
        if not self.warmup_steps:
            return optimizer
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=WARMUP_START, total_iters=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
