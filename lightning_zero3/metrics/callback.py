"""``Zero3Monitor``: logs step times and memory peaks to whatever logger the Trainer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_zero3.metrics import names
from lightning_zero3.metrics.census import read_censuses, start_censuses
from lightning_zero3.metrics.memory import read_memory
from lightning_zero3.metrics.over_ranks import PackedOverRanks
from lightning_zero3.metrics.step_time import (
    StepClock,
    discard_forward_times,
    read_engine_timers,
    read_skipped_steps,
    steps_taken,
)
from lightning_zero3.metrics.throughput import tokens_in

# What the progress bar shows, by short names: it has little room. Milliseconds and GiB.
_PROGRESS_BAR = {
    names.STEP_MICROSTEP: "step_microstep",
    names.PEAK_ALLOCATED: "gpu_peak_gib",
    names.HOST_RSS_PEAK: "host_peak_gib",
}


class Zero3Monitor(Callback):
    """Log DeepSpeed's step, forward and backward micro-step timers and the memory peaks.

    Values are the maximum over ranks, by one collective per logged step (``Trainer(log_every_n_steps=...)``) and none
    on other steps; :mod:`lightning_zero3.metrics.names` defines each. Works with any strategy: without a DeepSpeed
    engine there are no micro-step timers, the rest is logged all the same.

    Args:
        tokens_per_batch: Counts the tokens of a batch; by default the elements of ``input_ids``. None is returned for
            a batch without tokens, and then there is no tokens per second.
        progress_bar: Also show step_microstep and peak memory in the progress bar.
        grad_clear_census: Count the optimizer step's gradient clears (``optim/grad_clear_*``), with our optimizer.
        collective_census: Count the optimizer step's collectives (``optim/collectives_per_step``), with our optimizer.
    """

    def __init__(
        self,
        *,
        tokens_per_batch: Callable[[Any], int | None] = tokens_in,
        progress_bar: bool = True,
        grad_clear_census: bool = False,
        collective_census: bool = False,
    ) -> None:
        self._tokens_per_batch = tokens_per_batch
        self._progress_bar = progress_bar
        self._grad_clear_census = grad_clear_census
        self._collective_census = collective_census
        self._clock = StepClock()
        self._tokens: int | None = 0
        self._global_step = 0
        self._engine_steps: int | None = None
        self._skipped: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ask the strategy for step timers before it builds its engine."""
        enable = getattr(trainer.strategy, "enable_step_timers", None)
        # Under manual optimization the engine's timers are stopped before they are started, and raise.
        if stage == "fit" and enable is not None and pl_module.automatic_optimization:
            enable()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Start the clock."""
        self._global_step = trainer.global_step
        start_censuses(trainer.strategy.model, grad_clear=self._grad_clear_census, collectives=self._collective_census)
        discard_forward_times(trainer.strategy.model)
        self._tokens = 0
        self._clock.restart()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Stop the clock: validation may come between two micro-steps of one optimizer step."""
        self._clock.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Go on, without the times of validation's forwards."""
        discard_forward_times(trainer.strategy.model)
        self._clock.resume()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """The batch has arrived."""
        self._engine_steps = steps_taken(trainer.strategy.model)
        self._skipped = read_skipped_steps(trainer.strategy.model)
        self._clock.batch_starts()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Count tokens; after an optimizer step that is logged, measure and log."""
        tokens = self._tokens_per_batch(batch)
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        # A skipped step doesn't count in global_step, and is over all the same.
        skipped = read_skipped_steps(trainer.strategy.model) != self._skipped
        if trainer.global_step == self._global_step and not skipped:
            self._clock.batch_ends()
            return
        self._global_step = trainer.global_step
        times = self._clock.step_ends()
        # Lightning's own device monitor asks in the same way; the answer is the same on all ranks.
        if trainer._logger_connector.should_update_logs:
            self._log(trainer, pl_module, times)
        self._tokens = 0

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, times: dict[str, float]) -> None:
        device = trainer.strategy.root_device
        engine = trainer.strategy.model
        values = {**times, **read_memory(device), **read_censuses(engine), **read_skipped_steps(engine)}
        # Where an epoch ends in the middle of accumulation, Lightning counts a step that the engine doesn't take; the
        # timers are then of a micro-step that updates nothing.
        if steps_taken(engine) != self._engine_steps:
            values.update(read_engine_timers(engine))
        if self._tokens:
            # Tensor-parallel peers see the same tokens, so the first of them counts.
            layout, rank = getattr(trainer.strategy, "parallel_layout", None), trainer.global_rank
            counts = layout is None or layout.tensor_parallel_ranks(rank)[0] == rank
            values[names.TOKENS_PER_SECOND] = float(self._tokens) if counts else 0.0
        over_ranks = PackedOverRanks([names.BY_NAME[name].over_ranks for name in values]).to(device)
        over_ranks.update(list(values.values()))
        combined = dict(zip(values, over_ranks.compute(), strict=True))
        if names.TOKENS_PER_SECOND in combined:
            combined[names.TOKENS_PER_SECOND] /= combined[names.STEP_TOTAL] / 1e3
        pl_module.log_dict(combined, on_step=True, on_epoch=False)
        if self._progress_bar:
            shown = {short: combined[name] for name, short in _PROGRESS_BAR.items() if name in combined}
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True, logger=False)
