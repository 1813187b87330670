# SPDX-License-Identifier: Apache-2.0
"""``Zero3Profile``: torch's profiler for chosen steps, with the optimizer step's phases as named regions.

Upstream symbols: ``torch.cuda.memory._record_memory_history`` and ``_dump_snapshot`` (torch 2.8 to 2.13), the only way
to a memory snapshot. Without CUDA they aren't called. Expires when torch has public names for them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.profiler import ProfilerActivity

from lightning_zero3.config import SetupError
from lightning_zero3.metrics.profile_figures import figures, read
from lightning_zero3.metrics.profile_regions import WHOLE_STEP, Regions

# Names in the folder. TensorBoard's plugin finds traces by their ending; the number keeps those of two profiles apart.
NUMBERS, PAGE = "profile.json", "profile.md"
TRACE_ENDING = ".pt.trace.json.gz"


class Zero3Profile(Callback):
    """Profile some steps: a trace for Perfetto and TensorBoard, and what each phase of the step costs.

    Phases are forward, backward, and every part of the optimizer step: release, norms, gradient clear, updates, gather.
    For each: host time, device time, kernels, collectives, parameter visits. Methods of the engine and its optimizer
    are wrapped for the profiled steps and put back after them; other steps cost a comparison. Results don't change.

    All ranks are profiled, so that none waits for one that is slower, and each writes its trace; the table is rank 0's.
    It is printed when the fit ends, and kept as ``profile.md`` and ``profile.json``. Logged times of the profiled steps
    contain the profiler, and that of the step after them the writing.

    Args:
        steps: First and last optimizer step, counted from 1 as ``trainer.global_step`` counts them. The first steps of
            a run allocate states and learn the order of parameters.
        folder: Where to write, the same on all ranks; by default ``profile`` in the run's folder.
        memory: Also record memory: for each phase its peak and what it keeps, and allocations in the trace. On CUDA
            also a snapshot for https://pytorch.org/memory_viz, which torch has for no CPU.
        table: Print the table on rank 0.

    Raises:
        SetupError: There are no such steps. In ``setup``: the strategy is no DeepSpeed strategy with Stage 3, or the
            Trainer has torch's profiler already.
    """

    def __init__(
        self,
        steps: tuple[int, int] = (5, 6),
        *,
        folder: str | Path | None = None,
        memory: bool = False,
        table: bool = True,
    ) -> None:
        if len(steps) != 2 or not all(isinstance(step, int) for step in steps) or not 1 <= steps[0] <= steps[1]:
            raise SetupError(f"Zero3Profile(steps={steps!r}): the first and the last step, such as (5, 6), from 1 on.")
        self._steps = (steps[0], steps[1])
        self._given_folder = folder
        self._memory, self._table = memory, table
        self._folder = Path()
        self._profile: Any = None
        self._scope, self._step_scope = ExitStack(), ExitStack()
        self._regions: Regions | None = None
        self._first = self._step = 0
        self._done = False
        self._result: Any = None

    @property
    def folder(self) -> Path:
        """Where the files are, once a fit has begun."""
        return self._folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """See whether this can be profiled, and agree on a folder.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: Lightning's name of what begins.

        Raises:
            SetupError: The strategy isn't ZeRO Stage 3, or the Trainer has torch's profiler already.
        """
        if stage != "fit":
            return
        strategy = trainer.strategy
        config: Any = getattr(strategy, "config", None)
        if not isinstance(config, dict) or config.get("zero_optimization", {}).get("stage") != 3:
            raise SetupError(
                f"Zero3Profile with {type(strategy).__name__}: its phases are those of ZeRO Stage 3; take "
                "strategy='zero3_fast', or another DeepSpeed strategy with Stage 3."
            )
        # By name: pytorch_lightning has a class of its own.
        if "PyTorchProfiler" in [kind.__name__ for kind in type(trainer.profiler).__mro__]:  # type: ignore[attr-defined]
            raise SetupError(
                "Zero3Profile with Trainer(profiler='pytorch'): torch has one profiler at a time; leave one out."
            )
        folder = self._given_folder
        if folder is None:
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "profile"
        self._folder = Path(strategy.broadcast(str(folder)))
        self._done, self._result = False, None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Begin, where a chosen step begins."""
        step = trainer.global_step + 1
        if self._done or not self._steps[0] <= step <= self._steps[1]:
            return
        if self._profile is None:
            self._start(trainer, step)
        if step != self._step:
            assert self._regions is not None
            self._step = step
            # TensorBoard's plugin knows steps by this name.
            self._step_scope.enter_context(self._regions.region(WHOLE_STEP, label=f"ProfilerStep#{step}"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """End, where the last one does. A skipped step doesn't count, and is in the one that does."""
        if self._profile is None or trainer.global_step < self._step:
            return
        self._step_scope.close()
        if trainer.global_step >= self._steps[1]:
            self._finish(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Write what there is, if the fit was shorter; print."""
        if self._profile is not None:
            self._step_scope.close()
            self._finish(trainer)
        if not self._done:
            first, last = self._steps
            rank_zero_warn(f"Zero3Profile(steps=({first}, {last})): the fit took no such step; nothing was profiled.")
        if self._result is not None and self._table:
            from lightning_zero3.metrics.profile_table import show  # rich isn't loaded before

            show(self._result)
            print(f"Profile: {self._folder}/{PAGE}, {NUMBERS}; a trace of each rank for https://ui.perfetto.dev")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Stop, and write nothing."""
        self._stop()

    def _start(self, trainer: pl.Trainer, step: int) -> None:
        device = trainer.strategy.root_device
        on_device = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        self._first, self._step = step, 0
        self._profile = torch.profiler.profile(activities=activities, profile_memory=self._memory)
        self._regions = Regions(trainer.strategy.model)
        if self._memory and on_device:
            torch.cuda.memory._record_memory_history(device=device)
            self._scope.callback(torch.cuda.memory._record_memory_history, enabled=None, device=device)
        self._scope.enter_context(self._regions.installed())
        self._profile.start()
        self._scope.callback(self._profile.stop)  # waits for the device

    def _stop(self) -> None:
        self._step_scope.close()
        self._scope.close()
        self._profile = None

    def _finish(self, trainer: pl.Trainer) -> None:
        profile, regions, device = self._profile, self._regions, trainer.strategy.root_device
        assert regions is not None
        on_device, rank = device.type == "cuda", trainer.global_rank
        self._folder.mkdir(parents=True, exist_ok=True)
        notes = []
        if self._memory and on_device:
            snapshot = self._folder / f"memory_rank_{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            notes.append(f"Each rank's memory snapshot ({snapshot.name}) is for https://pytorch.org/memory_viz.")
        elif self._memory:
            notes.append("There is no memory snapshot: torch has it for CUDA's allocator only.")
        self._stop()
        self._done = True
        last = max(self._first, trainer.global_step)
        trace = self._folder / f"rank_{rank}.steps_{self._first}_to_{last}{TRACE_ENDING}"
        profile.export_chrome_trace(str(trace))
        if not trainer.is_global_zero:
            return
        from lightning_zero3.metrics.profile_table import Profile, as_numbers, markdown

        recorded = read(profile, regions.labels, on_device=on_device, memory=self._memory)
        self._result = Profile(
            steps=(self._first, last),
            rank=rank,
            ranks=trainer.world_size,
            device=torch.cuda.get_device_name(device) if on_device else None,
            phases=figures(recorded, regions.counted),
            traces=trace.name,
            notes=notes,
        )
        (self._folder / NUMBERS).write_text(json.dumps(as_numbers(self._result), indent=1) + "\n")
        (self._folder / PAGE).write_text(markdown(self._result))
