# SPDX-License-Identifier: Apache-2.0
"""What logging every step costs: ``Zero3Monitor`` on and off, step by step in one run.

    python benchmarks/monitor_cost.py [--steps 200] [--json out.json]

One process trains GLM-4.5-Air's structure at tiny widths (46 layers, 45 of them with experts) on a CPU, with a CSV
logger. Odd steps are logged by the monitor, even ones are as without it: its hooks do nothing, and the engine is set as
one that times nothing. Neighbouring steps are compared, so what else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from step_arms import VOCABULARY, tiny_glm
from torch.utils.data import DataLoader, Dataset

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor

ARMS = ("without", "with")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token ids, to be predicted from those before."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        """How many."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample."""
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Module(pl.LightningModule):
    """The model, trained on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_glm()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """The model's own loss."""
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        self.log("train/loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class EveryOtherStep(Zero3Monitor):
    """The monitor, at work in every other step; times all of them.

    Args:
        warm_up: Steps that aren't kept.
    """

    def __init__(self, warm_up: int) -> None:
        super().__init__(peak_flops=1e12, progress_bar=False)
        self.milliseconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self._warm_up = warm_up
        self._began = 0.0
        self._engine_timers: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """End the last step's time, begin this one's."""
        now = time.perf_counter()
        if batch_idx > self._warm_up:
            self.milliseconds[ARMS[(batch_idx - 1) % 2]].append((now - self._began) * 1e3)
        self._switch(trainer.strategy.model, on=batch_idx % 2 == 1)
        self._began = time.perf_counter()
        if batch_idx % 2 == 1:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure and log, or nothing."""
        if batch_idx % 2 == 1:
            self._global_step = trainer.global_step - 1
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _switch(self, engine: Any, *, on: bool) -> None:
        """Make the engine one that times, or one that was built without timers."""
        from deepspeed.runtime.engine import EngineTimers

        if not self._engine_timers:
            self._engine_timers = {"with": engine.engine_timers, "without": EngineTimers(False, False)}
        engine.engine_timers = self._engine_timers[ARMS[on]]
        engine._config.wall_clock_breakdown = on


def measure(steps: int, tokens: int, warm_up: int) -> dict[str, Any]:
    """Train, and compare neighbouring steps.

    Args:
        steps: Steps of each kind.
        tokens: Tokens of a batch.
        warm_up: Steps before.

    Returns:
        Milliseconds of a step without and with (medians), the median difference of neighbours in ms, and in percent of
        the median step without.
    """
    ids = torch.randint(0, VOCABULARY, (2 * steps + warm_up + 1, tokens), generator=torch.Generator().manual_seed(1))
    monitor = EveryOtherStep(warm_up)
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=Zero3FastStrategy(expert_parallel_size=1),
            max_epochs=1,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[monitor],
        ).fit(Module(), DataLoader(Sentences(ids), batch_size=1))
    times = monitor.milliseconds
    pairs = list(zip(*(times[arm] for arm in ARMS), strict=False))
    difference = statistics.median(with_it - without for without, with_it in pairs)
    without = statistics.median(times["without"])
    return {
        "pairs": len(pairs),
        "metrics": len(monitor.latest),
        "step_without_ms": without,
        "step_with_ms": statistics.median(times["with"]),
        "difference_ms": difference,
        "cost_percent": 100 * difference / without,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps with, and as many without")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a batch")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    result = measure(options.steps, options.tokens, options.warm_up)
    for name, value in result.items():
        print(f"{name:>18}: {value:.3f}" if isinstance(value, float) else f"{name:>18}: {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
