# SPDX-License-Identifier: Apache-2.0
"""One recipe run, from settings to a trained model, its logs, its table and its chart."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_zero3 import SaveHuggingFace, Zero3FastStrategy, Zero3Monitor, Zero3Profile
from lightning_zero3.config import Zero3Options
from lightning_zero3.metrics.summary import read_metrics, summarise
from lightning_zero3.metrics.summary_table import print_table
from shared import attention, checkpoints, gpu_memory, lost_peer, preflight
from shared.data import PackedTokens, TokenStream, unigram_entropy
from shared.deepspeed_config import deepspeed_config
from shared.loader import make_loader
from shared.module import CausalLanguageModel
from shared.noise import without_known_noise
from shared.report import draw_chart, print_steps
from shared.saving import STOPPED_BY_SIGNAL, SameCheckpoint, Saving
from shared.settings import BENCHMARK_WARMUP_STEPS, Settings

if TYPE_CHECKING:
    from shared.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """What is known of a run before anything is started; it may be fitted more than once.

    Args:
        title: What the model is called, with its size.
        config: The model's.
        devices: Processes on this node, or "auto" for every GPU.
        ranks: The number of ranks.
        experts: The expert parallel size.
        stream: The data's tokens.
        samples: The same, cut into samples.
        entropy: The tokens' unigram entropy, in nats.
        made_by: See :func:`shared.checkpoints.identity`.
        resumed: The checkpoint to go on from.
    """

    title: str
    config: Any
    devices: int | str
    ranks: int
    experts: int
    stream: TokenStream
    samples: PackedTokens
    entropy: float
    made_by: dict[str, Any]
    resumed: checkpoints.Checkpoint | None


@without_known_noise()
def train(recipe: Recipe, settings: Settings) -> Path:
    """Train, log, and show what happened.

    Args:
        recipe: The architecture.
        settings: How to train it.

    Returns:
        The run's folder, with ``metrics.csv``, TensorBoard's files and ``chart.png``.

    Raises:
        SetupError: Data, tokenizer, sizes or this machine don't fit the settings; before any process group exists.
        LostPeerError: Another process has ended, or can't be reached.
        SystemExit: With status 75, after a signal and a checkpoint.
    """
    prepared = prepare(recipe, settings)
    title, entropy = prepared.title, prepared.entropy
    run_dir, trainer, stopped = fit(recipe, settings, prepared)
    if trainer.is_global_zero:
        metrics = read_metrics(run_dir / "metrics.csv")
        if settings.benchmark:
            print_steps(metrics, title=title, warmup=BENCHMARK_WARMUP_STEPS)
        print_table(summarise(metrics), title=title)
        draw_chart(metrics, run_dir / "chart.png", title=title, entropy=entropy)
        print(f"Unigram entropy of the data: {entropy:.3f} nats; a loss below it has learned from context.")
        print(
            f"Chart: {run_dir / 'chart.png'}   Logs: {run_dir / 'metrics.csv'}, "
            f"tensorboard --logdir {quote(str(settings.output))}"
        )
    if stopped:
        if trainer.is_global_zero:
            print(f"Stopped by a signal and saved after step {trainer.global_step}; --resume auto goes on from there.")
        trainer.strategy.barrier("rank 0 has drawn its chart")  # the first that ends has others ended by the launcher
        sys.exit(STOPPED_BY_SIGNAL)
    return run_dir


def prepare(recipe: Recipe, settings: Settings) -> Prepared:
    """Look at everything that can be looked at before a process is started or a group made.

    Args:
        recipe: The architecture.
        settings: How to train it.

    Raises:
        SetupError: Data, tokenizer, sizes or this machine don't fit the settings.
    """
    layers = "" if settings.layers is None else f", {settings.layers} layers"
    devices = settings.devices or preflight.local_processes()
    ranks = preflight.world_size(devices, settings.num_nodes)
    config = recipe.config(settings)
    preflight.check_machine(settings, recipe.name)
    preflight.check_launcher(devices, settings.num_nodes)
    preflight.check_output(settings.output)
    experts = preflight.expert_parallel_size(settings, config, ranks)
    preflight.check_model(recipe.model_class, config, make_strategy(settings, expert_parallel_size=experts), ranks)
    stream, samples = preflight.check_data(settings, config, ranks)
    made_by = checkpoints.identity(
        settings,
        recipe=recipe.name,
        ranks=ranks,
        expert_parallel_size=experts,
        data=f"{stream.description} (digest {stream.fingerprint()})",
    )
    resumed = checkpoints.to_resume(settings, made_by)
    # Last: a minute.
    gpu_memory.check_gpu_memory(settings, config, ranks=ranks, expert_parallel_size=experts)
    title = f"{recipe.name} ({settings.size}{layers})"
    entropy = unigram_entropy(stream.tokens)
    return Prepared(title, config, devices, ranks, experts, stream, samples, entropy, made_by, resumed)


def fit(
    recipe: Recipe,
    settings: Settings,
    prepared: Prepared,
    *,
    title: str | None = None,
    grad_clear_census: bool = False,
    collective_census: bool = False,
) -> tuple[Path, pl.Trainer, bool]:
    """Train and log.

    Args:
        recipe: The architecture.
        settings: How to train it.
        prepared: See :func:`prepare`.
        title: What is said to be trained; ``prepared``'s own by default.
        grad_clear_census: As ``Zero3Monitor``'s; likewise the other.
        collective_census: See grad_clear_census.

    Returns:
        The run's folder (rank 0's), the trainer, and whether a signal has stopped it.

    Raises:
        LostPeerError: Another process has ended, or can't be reached.
    """
    on_gpu = torch.cuda.is_available()
    resumed, config = prepared.resumed, prepared.config
    csv = CSVLogger(settings.output, name="", flush_logs_every_n_steps=10)
    run_dir = Path(csv.log_dir)
    saving: list[Callback] = []
    if settings.checkpoint_every is not None:
        every, keep = settings.checkpoint_every, settings.keep
        saving = [
            Saving(run_dir, output=settings.output, every=every, keep=keep, made_by=prepared.made_by, resumed=resumed)
        ]
    if settings.save_hf:
        tokenizer = settings.tokenizer if settings.tokenizer and Path(settings.tokenizer).is_dir() else None
        # Layers that were left out aren't in between of those that were trained.
        base = settings.weights if settings.layers is None else None
        saving.append(SaveHuggingFace(run_dir / "hugging_face", base=base, tokenizer=tokenizer))
    steps, profiling = settings.profiled_steps, []
    if steps is not None:
        profiling = [Zero3Profile(steps, folder=run_dir / "profile", memory=settings.profile_memory)]
    per_step = settings.micro_batch_size * settings.accumulate_grad_batches
    told = attention.describe(config, settings.attention)
    trainer = pl.Trainer(
        strategy=make_strategy(settings, expert_parallel_size=prepared.experts),
        accelerator="gpu" if on_gpu else "cpu",
        devices=prepared.devices,
        num_nodes=settings.num_nodes,
        precision=settings.precision,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        max_steps=settings.steps,
        # So that the progress bar counts to the end of the run, not of the data.
        limit_train_batches=settings.steps * settings.accumulate_grad_batches,
        # As many as that takes; Lightning's progress bar has a strange way to say "no limit".
        max_epochs=settings.steps * per_step * prepared.ranks // len(prepared.samples) + 1,
        log_every_n_steps=1,
        logger=[csv, TensorBoardLogger(settings.output, name="", version=csv.version, sub_dir="tensorboard")],
        callbacks=[
            Zero3Monitor(  # a table is printed from the log, at the end
                summary=False, grad_clear_census=grad_clear_census, collective_census=collective_census
            ),
            _Introduce(title or prepared.title, prepared.stream.description, prepared.entropy, told, resumed),
            SameCheckpoint(resumed),
            *saving,
            *profiling,
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    pl.seed_everything(settings.seed, verbose=False)
    module = make_module(recipe, config, settings)
    loader = make_loader(
        prepared.samples,
        batch_size=settings.micro_batch_size,
        ranks=prepared.ranks,
        seed=settings.seed,
        pin_memory=on_gpu,
    )
    try:
        with attention.only_cudnn(settings.attention):
            trainer.fit(module, loader, ckpt_path=None if resumed is None else resumed.path)
    except Exception as error:
        if not lost_peer.is_one(error):
            raise
        raise lost_peer.explained(
            error,
            rank=trainer.global_rank,
            step=trainer.global_step,
            timeout_seconds=settings.timeout_seconds,
            saved=settings.checkpoint_every is not None,
        ) from error
    return run_dir, trainer, any(callback.stopped for callback in saving if isinstance(callback, Saving))


def make_strategy(settings: Settings, *, expert_parallel_size: int) -> Zero3FastStrategy:
    """The strategy that settings ask for, with all of its own options.

    Args:
        settings: The run's.
        expert_parallel_size: In place of the one in the settings, which may be None for a choice by the recipe.
    """
    options = {field.name: getattr(settings, field.name) for field in fields(Zero3Options)}
    return Zero3FastStrategy(
        config=deepspeed_config(settings, on_gpu=torch.cuda.is_available()),
        timeout=timedelta(seconds=settings.timeout_seconds),
        **{**options, "expert_parallel_size": expert_parallel_size},
    )


def make_module(recipe: Recipe, config: Any, settings: Settings) -> CausalLanguageModel:
    """The module that is trained.

    Args:
        recipe: The architecture.
        config: The model's config.
        settings: The run's.
    """
    return CausalLanguageModel(
        recipe.model_class,
        config,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        recompute_activations=settings.recompute_activations,
        loss_tiles=settings.loss_tiles,
        seed=settings.seed,
        weights=settings.weights,
        skip_layers=range(config.num_hidden_layers, recipe.configs[settings.size](None).num_hidden_layers),
    )


class _Introduce(Callback):
    """Say what is about to be trained, once the model is built and partitioned."""

    def __init__(
        self, name: str, data: str, entropy: float, attention: str, resumed: checkpoints.Checkpoint | None
    ) -> None:
        self.name, self.data, self.entropy, self.attention, self.resumed = name, data, entropy, attention, resumed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        if not trainer.is_global_zero:
            return
        optimizer: Any = trainer.strategy.model.optimizer  # type: ignore[union-attr]
        groups = optimizer.fp16_groups
        print(
            f"{self.name}: {sum(map(len, groups))} parameter tensors in {len(groups)} sub-groups on each of "
            f"{trainer.world_size} ranks, {len(optimizer.aliased_sub_groups())} of them without a second copy\n"
            f"{self.attention}\n"
            f"Data: {self.data}; unigram entropy {self.entropy:.3f} nats"
        )
        if self.resumed is not None:
            print(f"Resumed after step {self.resumed.step}, from {self.resumed.path}")
