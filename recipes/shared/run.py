"""One recipe run, from settings to a trained model, its logs, its table and its chart."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, fields
from math import gcd
from pathlib import Path
from shlex import quote
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.config import SetupError
from lightning_zero3.metrics.summary import read_metrics, summarise
from shared.data import PackedTokens, load_tokens, unigram_entropy
from shared.module import CausalLanguageModel
from shared.report import draw_chart, print_table


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train one size of a model. A recipe states these for each of its sizes.

    Args:
        sequence_length: Tokens of one sample.
        micro_batch_size: Samples of one micro-step on one rank.
        max_steps: Optimizer steps.
        learning_rate: AdamW's.
        warmup_steps: Steps of linear warm-up.
        precision: Lightning's name, e.g. "bf16-mixed".
        expert_parallel_size: Ranks that share one set of experts; None takes the largest that fits ranks and experts.
        recompute_activations: Whether layers are computed again in backward.
        max_tokens: How much of the data is read; None reads all of it.
        needs_gpu: Whether a run without a GPU makes no sense.
    """

    sequence_length: int
    micro_batch_size: int
    max_steps: int
    learning_rate: float
    warmup_steps: int
    precision: Any
    expert_parallel_size: int | None
    recompute_activations: bool
    max_tokens: int | None
    needs_gpu: bool

    def with_overrides(self, **given: Any) -> Settings:
        """These settings with those that the user gave; None means not given.

        Raises:
            SetupError: A number that must be positive isn't.
        """
        merged = {field.name: getattr(self, field.name) for field in fields(self)}
        merged.update({name: value for name, value in given.items() if value is not None})
        for name in ("sequence_length", "micro_batch_size", "max_steps", "expert_parallel_size", "max_tokens"):
            if merged[name] is not None and merged[name] < 1:
                raise SetupError(f"--{name} {merged[name]}: 1 or more.")
        return Settings(**merged)


def local_processes() -> int | str:
    """How many processes to use on this node: the launcher's number, every GPU, or two on a machine without one."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return "auto" if torch.cuda.is_available() else 2


def train(
    name: str,
    *,
    settings: Settings,
    model_class: type[Any],
    config: Any,
    experts: int,
    data: str,
    tokenizer: str | None,
    text_field: str,
    devices: int | str,
    num_nodes: int,
    output: Path,
    seed: int,
    switches: dict[str, bool],
) -> Path:
    """Train, log, and show what happened.

    Args:
        name: What the table and the chart are called.
        settings: How to train.
        model_class: The Hugging Face class.
        config: Its config.
        experts: Routed experts of a MoE layer, to choose an expert parallel size where none is given.
        data: See :func:`shared.data.load_tokens`.
        tokenizer: Likewise.
        text_field: Likewise.
        devices: Processes on this node.
        num_nodes: Nodes.
        output: Folder for runs; each gets a folder ``version_N`` of its own.
        seed: For weights and the order of the data.
        switches: Switches of :class:`lightning_zero3.Zero3FastStrategy`.

    Returns:
        The run's folder, with ``metrics.csv``, TensorBoard's files and ``chart.png``.

    Raises:
        SetupError: Data, tokenizer, sizes or this machine don't fit the settings; before any process group exists.
    """
    _quiet_known_noise()
    if settings.needs_gpu and not torch.cuda.is_available():
        raise SetupError(f"{name} needs GPUs, and PyTorch sees none on this machine. --size tiny runs anywhere.")
    try:
        stream = load_tokens(data, tokenizer=tokenizer, text_field=text_field, max_tokens=settings.max_tokens)
        samples = PackedTokens(stream, settings.sequence_length)
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error
    if stream.vocab_size > config.vocab_size:
        raise SetupError(
            f"The tokenizer has {stream.vocab_size:,} tokens, the model's vocabulary {config.vocab_size:,}. Choose a "
            "tokenizer that fits the model."
        )
    if settings.sequence_length > config.max_position_embeddings:
        raise SetupError(
            f"--sequence_length {settings.sequence_length}: the model has {config.max_position_embeddings} positions."
        )
    entropy = unigram_entropy(stream.tokens)

    csv = CSVLogger(output, name="", flush_logs_every_n_steps=10)
    run_dir = Path(csv.log_dir)
    world = _world_size(devices, num_nodes)
    strategy = Zero3FastStrategy(
        expert_parallel_size=settings.expert_parallel_size or gcd(world, experts),
        scoped_grad_clear=switches["scoped_grad_clear"],
        alias_master_weights=switches["alias_master_weights"],
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        num_nodes=num_nodes,
        precision=settings.precision,
        max_steps=settings.max_steps,
        # So that the progress bar counts to the end of the run, not of the data.
        limit_train_batches=settings.max_steps,
        # As many as that takes; Lightning's progress bar has a strange way to say "no limit".
        max_epochs=settings.max_steps * settings.micro_batch_size * world // len(samples) + 1,
        log_every_n_steps=1,
        logger=[csv, TensorBoardLogger(output, name="", version=csv.version, sub_dir="tensorboard")],
        callbacks=[Zero3Monitor(), _Introduce(name, stream.description, entropy)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    pl.seed_everything(seed, verbose=False)
    module = CausalLanguageModel(
        model_class,
        config,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        recompute_activations=settings.recompute_activations,
        seed=seed,
    )
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=settings.micro_batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        metrics = read_metrics(run_dir / "metrics.csv")
        print_table(summarise(metrics), title=name)
        draw_chart(metrics, run_dir / "chart.png", title=name, entropy=entropy)
        print(f"Unigram entropy of the data: {entropy:.3f} nats; a loss below it has learned from context.")
        print(
            f"Chart: {run_dir / 'chart.png'}   Logs: {run_dir / 'metrics.csv'}, "
            f"tensorboard --logdir {quote(str(output))}"
        )
    return run_dir


class _Introduce(Callback):
    """Say what is about to be trained, once the model is built and partitioned."""

    def __init__(self, name: str, data: str, entropy: float) -> None:
        self.name, self.data, self.entropy = name, data, entropy

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        if not trainer.is_global_zero:
            return
        optimizer: Any = trainer.strategy.model.optimizer  # type: ignore[union-attr]
        groups = optimizer.fp16_groups
        print(
            f"{self.name}: {sum(map(len, groups))} parameter tensors in {len(groups)} sub-groups on each of "
            f"{trainer.world_size} ranks, {len(optimizer.aliased_sub_groups())} of them without a second copy\n"
            f"Data: {self.data}; unigram entropy {self.entropy:.3f} nats"
        )


def _world_size(devices: int | str, num_nodes: int) -> int:
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    local = int(devices) if str(devices).isdigit() else max(1, torch.cuda.device_count())
    return local * num_nodes


def _quiet_known_noise() -> None:
    """Say what DeepSpeed would find out and warn about; drop what doesn't concern a recipe's user."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
