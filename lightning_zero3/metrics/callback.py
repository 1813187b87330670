# SPDX-License-Identifier: Apache-2.0
"""``Zero3Monitor``: logs where a step's time and memory go to whatever logger the Trainer has.

Upstream symbols, read, as Lightning's own device monitor reads them (Lightning 2.6.6):
``_logger_connector.should_update_logs`` (whether a step is logged) and ``epoch_loop._batches_that_stepped`` (the
loggers' step axis). Detected by tests. Expires when the Trainer tells both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.config import SetupError
from lightning_zero3.expert_counts import ExpertCounts, routers_in
from lightning_zero3.flops import flops_or_reason
from lightning_zero3.hardware import peak_flops as known_peak_flops
from lightning_zero3.metrics import names, prometheus
from lightning_zero3.metrics.census import read_censuses, start_censuses
from lightning_zero3.metrics.engine_timers import (
    discard_forward_times,
    read_engine_timers,
    start_timing,
    stop_timing,
)
from lightning_zero3.metrics.memory import memory_capacities, read_memory
from lightning_zero3.metrics.optimizer_values import read_learning_rate, read_optimizer
from lightning_zero3.metrics.out_of_memory import OutOfMemoryReport
from lightning_zero3.metrics.running_summary import RunningSummary
from lightning_zero3.metrics.step_time import StepClock, read_skipped_steps, steps_taken
from lightning_zero3.metrics.step_values import StepValues, layer_names
from lightning_zero3.metrics.tensorboard_layout import add_layout
from lightning_zero3.metrics.throughput import lengths_in, tokens_in

# What the progress bar shows, by short names: it has little room. Milliseconds and GiB.
_PROGRESS_BAR = {
    names.STEP_MICROSTEP: "step_microstep",
    names.TOKENS_PER_SECOND: "tokens/s",
    names.PEAK_ALLOCATED: "gpu_peak_gib",
    names.HOST_RSS_PEAK: "host_peak_gib",
}


class Zero3Monitor(OutOfMemoryReport):
    """Log a step's times, memory, throughput and router load, over all ranks.

    By one collective per logged step (``Trainer(log_every_n_steps=...)``); other steps have no collective,
    synchronisation, allocation or timer event for it. :mod:`lightning_zero3.metrics.names` defines each metric. Works
    with any strategy: without a DeepSpeed engine there are no micro-step timers, the rest is logged all the same.

    An out-of-memory error is explained by one line, on the rank that has it, before it is raised.

    Args:
        tokens_per_batch: Counts the tokens of a batch; by default the elements of ``input_ids``. None is returned for
            a batch without tokens, and then there is no tokens per second.
        flops_per_batch: FLOPs that a batch needs, forward and backward, of this rank; None for one of which they
            aren't known. By default those of the Hugging Face model that is trained, at the lengths of ``input_ids``
            (:mod:`lightning_zero3.flops`).
        peak_flops: FLOP/s of one device in the run's precision; by default those of a GPU that is known
            (:mod:`lightning_zero3.hardware`). Without it there is no ``step/mfu``.
        progress_bar: Also show step_microstep, tokens per second and peak memory in the progress bar.
        summary: Print a table of the run on rank 0 when it has ended.
        prometheus_port: Port on which rank 0 serves ``/metrics`` for Prometheus during the fit; 0 takes a free one, and
            None (the default) serves nothing. A port that is in use is a warning.
        prometheus_address: Where it listens: this machine alone by default, ``"0.0.0.0"`` for all that reach it.
        run_name: The label ``run`` of what Prometheus gets, and the table's title; by default the logger's name and
            version.
        expert_load: Whether to count the tokens of each expert on logged steps (``moe/``).
        grad_clear_census: Count the optimizer step's gradient clears (``optim/grad_clear_*``), with our optimizer.
        collective_census: Count the optimizer step's collectives (``optim/collectives_per_step``), with our optimizer.

    Raises:
        SetupError: ``peak_flops`` is no number above 0, there is no such port, or prometheus-client isn't installed.
    """

    def __init__(
        self,
        *,
        tokens_per_batch: Callable[[Any], int | None] = tokens_in,
        flops_per_batch: Callable[[Any], float | None] | None = None,
        peak_flops: float | None = None,
        progress_bar: bool = True,
        summary: bool = True,
        prometheus_port: int | None = None,
        prometheus_address: str = prometheus.LOOPBACK,
        run_name: str | None = None,
        expert_load: bool = True,
        grad_clear_census: bool = False,
        collective_census: bool = False,
    ) -> None:
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise SetupError(
                f"peak_flops={peak_flops!r}: the FLOP/s of one device, a number above 0, or None for those of a GPU "
                "that is known."
            )
        prometheus.check_options(prometheus_address, prometheus_port)
        self._tokens_per_batch = tokens_per_batch
        self._flops_per_batch = flops_per_batch
        self._peak_flops = peak_flops
        self._progress_bar = progress_bar
        self._summary = RunningSummary() if summary else None
        self._prometheus_port, self._prometheus_address = prometheus_port, prometheus_address
        self._server: prometheus.PrometheusServer | None = None
        self._run_name = run_name
        self._expert_load = expert_load
        self._grad_clear_census = grad_clear_census
        self._collective_census = collective_census
        self._clock = StepClock()
        self._global_step = 0
        self._skipped: dict[str, float] = {}
        self._engine_steps: int | None = None
        # Whether the engine is in the middle of a step when Lightning's begins (stock_semantics).
        self._engine_in_step = self._timed_from_the_start = False
        self._step_begins, self._logs = True, False
        self._values = StepValues()
        self._flops: Callable[[Any], float | None] = lambda _: None
        self._peak = math.nan
        self._counts: ExpertCounts | None = None
        self._experts: dict[str, int] = {}
        self._latest: Mapping[str, float] = {}

    @property
    def latest(self) -> Mapping[str, float]:
        """The last logged step's metrics, over all ranks: name → value."""
        return MappingProxyType(dict(self._latest))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ask the strategy for step timers before it builds its engine."""
        super().setup(trainer, pl_module, stage)
        enable = getattr(trainer.strategy, "enable_step_timers", None)
        # Under manual optimization the engine's timers are stopped before they are started, and raise.
        if stage == "fit" and enable is not None and pl_module.automatic_optimization:
            enable()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what will be measured, make ready who shows it, and start the clock."""
        super().on_train_start(trainer, pl_module)
        engine = trainer.strategy.model
        self._global_step = trainer.global_step
        start_censuses(engine, grad_clear=self._grad_clear_census, collectives=self._collective_census)
        self._look_at_the_hardware(trainer)
        if self._peak == self._peak:  # known
            self._look_at_the_model(engine, pl_module)
        routers, sizes = routers_in(pl_module) if self._expert_load else ({}, {})
        if routers:
            self._counts = ExpertCounts(routers, sizes, trainer.strategy.root_device)
            self._counts.on = False
            self._experts = dict(zip(layer_names(list(routers)), sizes.values(), strict=True))
        discard_forward_times(engine)
        self._make_ready_to_show(trainer)
        self._step_begins, self._engine_in_step = True, False
        self._clock.restart()

    def _make_ready_to_show(self, trainer: pl.Trainer) -> None:
        add_layout(trainer.loggers)
        if self._summary is not None:
            self._summary = RunningSummary()
        if self._prometheus_port is not None and trainer.is_global_zero:
            self._stop_serving()
            self._server = prometheus.serve(
                self._prometheus_address,
                self._prometheus_port,
                run=self._name_of_run(trainer),
                ranks_per_node=max(1, trainer.num_devices),
                capacities=memory_capacities(trainer.strategy.root_device),
            )

    def _name_of_run(self, trainer: pl.Trainer) -> str:
        if self._run_name is not None:
            return self._run_name
        logger = trainer.logger
        parts = [] if logger is None else [logger.name, logger.version]
        return "/".join(str(part) for part in parts if part not in (None, "")) or "run"

    def _look_at_the_hardware(self, trainer: pl.Trainer) -> None:
        peak, device = self._peak_flops, trainer.strategy.root_device
        if peak is None and device.type == "cuda":
            peak = known_peak_flops(torch.cuda.get_device_name(device), str(trainer.precision))
        self._peak = math.nan if peak is None else peak

    def _look_at_the_model(self, engine: Any, pl_module: pl.LightningModule) -> None:
        if self._flops_per_batch is not None:
            self._flops = self._flops_per_batch
            return
        # AutoEP and AutoTP have replaced layers by now; our engine was looked at before.
        found = getattr(engine, "model_flops", None) or flops_or_reason(pl_module)
        if isinstance(found, str):
            if self._peak_flops is not None:
                rank_zero_warn(f"Zero3Monitor(peak_flops=...) logs no step/mfu: {found} Pass flops_per_batch.")
            return
        model = found

        def of_batch(batch: Any) -> float | None:
            lengths = lengths_in(batch)
            return None if lengths is None else model.training(lengths)

        self._flops = of_batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take the routers' hooks away, stop serving, and sum up."""
        self._stop_counting()
        self._stop_serving()
        if self._summary is not None and self._summary.steps and trainer.is_global_zero:
            from lightning_zero3.metrics.summary_table import print_table  # rich isn't loaded before

            print_table(self._summary.summary(), title=self._name_of_run(trainer))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Likewise, without a sum; explain an out-of-memory error."""
        super().on_exception(trainer, pl_module, exception)
        self._stop_counting()
        self._stop_serving()

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def _stop_counting(self) -> None:
        if self._counts is not None:
            self._counts.close()
        self._counts, self._experts = None, {}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation may come between two micro-steps of one optimizer step."""
        super().on_validation_start(trainer, pl_module)
        self._clock.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on, without the times of validation's forwards."""
        super().on_validation_end(trainer, pl_module)
        discard_forward_times(trainer.strategy.model)
        self._clock.resume()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch has arrived."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        engine = trainer.strategy.model
        self._engine_steps = steps_taken(engine)
        self._skipped = read_skipped_steps(engine)
        if self._step_begins:
            # Decided for all of a step's micro-steps. Lightning's own device monitor asks in the same way; the answer
            # is the same on all ranks.
            self._logs = trainer._logger_connector.should_update_logs
            self._timed_from_the_start = not self._engine_in_step
            if self._logs:
                self._values = StepValues(peak_flops=self._peak, experts=self._experts)
                self._values.metrics.update(read_learning_rate(trainer.optimizers))
                if self._counts is not None:
                    self._counts.counts.zero_()
        if self._logs:
            start_timing(engine, new_step=self._step_begins)
            self._count_experts(True)
        self._step_begins = False
        self._clock.batch_starts()

    def _count_experts(self, on: bool) -> None:
        if self._counts is not None:
            self._counts.on = on

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count tokens; after an optimizer step that is logged, measure and log."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        engine = trainer.strategy.model
        if self._logs:
            stop_timing(engine)
            self._count_experts(False)
            self._count(trainer, pl_module, outputs, batch)
        self._engine_in_step = steps_taken(engine) == self._engine_steps is not None
        # A skipped step doesn't count in global_step, and is over all the same.
        skipped = read_skipped_steps(engine) != self._skipped
        if trainer.global_step == self._global_step and not skipped:
            self._clock.batch_ends()
            return
        self._global_step = trainer.global_step
        self._step_begins = True
        times = self._clock.step_ends()
        if self._logs:
            self._measure(trainer, times, skipped=skipped)
            values = self._values.over_ranks(trainer.strategy.root_device, trainer.world_size)
            self._publish(trainer, pl_module, values)

    def _count(self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any) -> None:
        """Add a micro-step of a step that will be logged."""
        tokens, flops = self._tokens_per_batch(batch), self._flops(batch)
        # Tensor-parallel peers see the same tokens, so the first of them counts.
        layout, rank = getattr(trainer.strategy, "parallel_layout", None), trainer.global_rank
        counts = layout is None or layout.tensor_parallel_ranks(rank)[0] == rank
        self._values.tokens += (math.nan if tokens is None else tokens) * counts
        self._values.flops += (math.nan if flops is None else flops) * counts
        if pl_module.automatic_optimization:
            # Lightning has divided it by the number of micro-steps.
            loss = outputs.get("loss", math.nan) if isinstance(outputs, Mapping) else math.nan
            loss = loss.detach().double() if isinstance(loss, torch.Tensor) else loss
            self._values.metrics[names.LOSS_OF_STEP] = self._values.metrics.get(names.LOSS_OF_STEP, 0.0) + loss

    def _measure(self, trainer: pl.Trainer, times: dict[str, float], *, skipped: bool) -> None:
        """Add what is known at the step's end."""
        engine = trainer.strategy.model
        self._values.metrics.update(times)
        self._values.metrics.update(read_memory(trainer.strategy.root_device))
        self._values.metrics.update(read_censuses(engine))
        self._values.metrics.update(read_skipped_steps(engine))
        self._values.metrics.update(read_optimizer(engine, skipped=skipped))
        # Where an epoch ends in the middle of accumulation, Lightning counts a step that the engine doesn't take; the
        # timers are then of a micro-step that updates nothing.
        if not self._engine_in_step:
            self._values.metrics.update(read_engine_timers(engine, whole_step=self._timed_from_the_start))
        if self._counts is not None:
            self._values.expert_counts = self._counts.counts

    def _publish(self, trainer: pl.Trainer, pl_module: pl.LightningModule, values: Mapping[str, float]) -> None:
        """Hand a step's metrics, over all ranks, to whoever shows them."""
        self._latest = values
        if self._server is not None:
            self._server.publish(prometheus.Snapshot(trainer.global_step, values, self._values.of_each_rank()))
        if self._summary is not None:
            self._summary.add(trainer.global_step, values)
        # As Lightning's own monitors do: log_dict makes a tensor and a torchmetrics metric of every number, which took
        # several percent of a small model's step.
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        if self._progress_bar:
            shown = {short: values[name] for name, short in _PROGRESS_BAR.items() if name in values}
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True, logger=False)
