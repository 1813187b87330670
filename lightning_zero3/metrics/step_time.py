# SPDX-License-Identifier: Apache-2.0
"""The wall clock around whole optimizer steps, and which of them an engine has taken or skipped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_zero3.metrics import names


def steps_taken(engine: Any) -> int | None:
    """Optimizer steps that an engine has taken or skipped; None for any other module.

    Upstream: ``DeepSpeedEngine.global_steps``.
    """
    steps = getattr(engine, "global_steps", None)
    return steps if isinstance(steps, int) else None


def read_skipped_steps(engine: Any) -> dict[str, float]:
    """Optimizer steps that an engine has skipped.

    Upstream: ``DeepSpeedEngine.skipped_steps``.

    Args:
        engine: A DeepSpeed engine, or any other module.

    Returns:
        Metric name → count; empty for any other module.
    """
    skipped = getattr(engine, "skipped_steps", None)
    return {names.SKIPPED_STEPS: float(skipped)} if isinstance(skipped, int) else {}


class StepClock:
    """Wall time of optimizer steps, from the end of one to the end of the next.

    Args:
        now: Seconds of a monotonic clock; another one for tests.

    >>> ticks = iter([0.0, 1.0, 5.0])
    >>> clock = StepClock(now=lambda: next(ticks))
    >>> clock.restart()
    >>> clock.batch_starts()
    >>> clock.step_ends() == {"step/total_ms": 5000.0, "step/data_wait_ms": 1000.0}
    True
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._step_began = self._batch_ended = self._paused = 0.0
        self._waited = 0.0

    def restart(self) -> None:
        """Begin a step here: what came before (set-up) is no part of it."""
        self._step_began = self._batch_ended = self._now()
        self._waited = 0.0

    def pause(self) -> None:
        """What follows (validation) is no part of the step in progress."""
        self._paused = self._now()

    def resume(self) -> None:
        """The step goes on."""
        away = self._now() - self._paused
        self._step_began += away
        self._batch_ended += away

    def batch_starts(self) -> None:
        """The data of a micro-step has arrived."""
        self._waited += self._now() - self._batch_ended

    def batch_ends(self) -> None:
        """A micro-step without an optimizer step is over."""
        self._batch_ended = self._now()

    def step_ends(self) -> dict[str, float]:
        """An optimizer step is over.

        Returns:
            Metric name → milliseconds.
        """
        now = self._now()
        times = {names.STEP_TOTAL: (now - self._step_began) * 1e3, names.DATA_WAIT: self._waited * 1e3}
        self._step_began = self._batch_ended = now
        self._waited = 0.0
        return times
