# SPDX-License-Identifier: Apache-2.0
"""A run summed up while it goes, step by step, in memory that doesn't grow with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import EARLY_STEPS, GIB_SUFFIX, LAST_LOSSES, RunSummary, Spread, spread


@dataclass
class _Growing:
    """A :class:`Spread` of the values so far."""

    total: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)
        self.count += 1

    def spread(self) -> Spread | None:
        if math.isnan(self.total):  # as in summary.spread: one that is no number makes all so
            return Spread(math.nan, math.nan, math.nan, self.count)
        return Spread(self.total / self.count, self.minimum, self.maximum, self.count) if self.count else None


class RunningSummary:
    """What :func:`~lightning_zero3.metrics.summary.summarise` says of a log, without the log.

    Its loss is ``optim/loss``, which ``Zero3Monitor`` measures. Steps are numbered as in Note [Step numbers].
    """

    def __init__(self) -> None:
        self.steps = 0
        self._first_step: int | None = None
        self._early: dict[str, _Growing] = {}
        self._later: dict[str, _Growing] = {}
        self._memory: dict[str, float] = {}
        self._first_loss: float | None = None
        self._last_losses: deque[float] = deque(maxlen=LAST_LOSSES)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take a logged step.

        Args:
            step: Its number; they come in order.
            values: Metric name → value.
        """
        self.steps += 1
        self._first_step = step if self._first_step is None else self._first_step
        number = step - self._first_step + 1
        for name in (names.STEP_MICROSTEP, names.STEP_TOTAL, names.TOKENS_PER_SECOND):
            if number > 1 and name in values:
                self._later.setdefault(name, _Growing()).add(values[name])
                if number in EARLY_STEPS:
                    self._early.setdefault(name, _Growing()).add(values[name])
        for name, value in values.items():
            if name.startswith(names.MEMORY_PREFIX) and name.endswith(GIB_SUFFIX):
                self._memory[name] = max(self._memory.get(name, value), value)
        if names.LOSS_OF_STEP in values:
            loss = values[names.LOSS_OF_STEP]
            self._first_loss = loss if self._first_loss is None else self._first_loss
            self._last_losses.append(loss)

    def summary(self) -> RunSummary:
        """The run so far."""
        nothing = _Growing()
        last = spread(list(self._last_losses))
        return RunSummary(
            steps=self.steps,
            step_microstep_early=self._early.get(names.STEP_MICROSTEP, nothing).spread(),
            step_microstep=self._later.get(names.STEP_MICROSTEP, nothing).spread(),
            step_total_early=self._early.get(names.STEP_TOTAL, nothing).spread(),
            step_total=self._later.get(names.STEP_TOTAL, nothing).spread(),
            tokens_per_second=self._later.get(names.TOKENS_PER_SECOND, nothing).spread(),
            memory=dict(self._memory),
            loss_first=self._first_loss,
            loss_last=self._last_losses[-1] if self._last_losses else None,
            loss_last_mean=last.mean if last else None,
        )
