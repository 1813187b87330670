# SPDX-License-Identifier: Apache-2.0
"""Small fits through a real Trainer, for functions that run on ranks."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_zero3  # noqa: F401  (registers the strategies)

# A Trainer on CPUs that prints and writes nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Steps of a parity run: enough for moments, bias correction and persistence to matter.
STEPS = 5


class Regression(pl.LightningModule):
    """An MLP of odd sizes, so that partitions need padding."""

    def __init__(self, dims: tuple[int, ...] = (13, 31, 17, 7), lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(11)
        layers: list[torch.nn.Module] = []
        for size_in, size_out in itertools.pairwise(dims):
            layers += [torch.nn.Linear(size_in, size_out), torch.nn.GELU()]
        self.net = torch.nn.Sequential(*layers[:-1])
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = ((self.net(x).float() - y.float()) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


class Language(pl.LightningModule):
    """A Hugging Face causal model under an attribute name that nobody expects."""

    def __init__(self, model: torch.nn.Module | None, lr: float = 1e-3) -> None:
        super().__init__()
        self.some_odd_name = model
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.some_odd_name(**batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Pairs(Dataset):
    """Fixed random regression data."""

    def __init__(self, features: int = 13, targets: int = 7, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, features, generator=generator)
        self.y = torch.randn(length, targets, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Sentences(Dataset):
    """Fixed random token ids."""

    def __init__(self, vocab_size: int, sequence_length: int = 16, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, vocab_size, (length, sequence_length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def fit(
    module: pl.LightningModule,
    data: Dataset,
    strategy: Any,
    *,
    steps: int = STEPS,
    ckpt_path: str | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train for a few steps, without anything that prints or writes unless asked for."""
    trainer = pl.Trainer(
        **{
            **QUIET,
            "strategy": strategy,
            "devices": torch.distributed.get_world_size(),
            "max_steps": steps,
            "log_every_n_steps": 1,
            **options,
        }
    )
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    return trainer


def optimizer_of(trainer: pl.Trainer) -> Any:
    """The Stage-3 optimizer of a trainer after fit."""
    return trainer.strategy.model.optimizer


def tensors_of(optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Copies of everything that training changes: weights, masters, moments.

    The last rank's partitions end in padding where a size isn't divisible; DeepSpeed never initialises it, so it is cut
    off.
    """
    weights, masters, moments = [], [], []
    for index, group in enumerate(optimizer.fp16_groups):
        paddings = optimizer.groups_padding[index]
        real = torch.cat(
            [
                torch.arange(p.partition_numel()) < p.partition_numel() - pad
                for p, pad in zip(group, paddings, strict=True)
            ]
        )
        weights += [
            p.ds_tensor.detach()[: p.partition_numel() - pad].clone() for p, pad in zip(group, paddings, strict=True)
        ]
        master = optimizer.fp32_partitioned_groups_flat[index]
        masters.append(master.detach()[real].clone())
        for _, value in sorted(optimizer.optimizer.state[master].items()):
            if torch.is_tensor(value):
                moments.append(value.detach()[real].clone() if value.shape == real.shape else value.clone())
    return {"weights": weights, "masters": masters, "moments": moments}


def assert_equal_bits(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> None:
    """Every tensor of both has the same dtype, shape and bits."""
    for kind in left:
        assert len(left[kind]) == len(right[kind]), kind
        assert left[kind], f"no {kind} to compare"
        for index, (a, b) in enumerate(zip(left[kind], right[kind], strict=True)):
            assert a.dtype == b.dtype, (kind, index)
            assert torch.equal(a, b), (kind, index, (a.float() - b.float()).abs().max().item())
