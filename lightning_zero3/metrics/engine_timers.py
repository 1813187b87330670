# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own timers, running only in the steps that are logged, and read once in each of those.

Note [When DeepSpeed's timers cost]
    With ``wall_clock_breakdown`` an engine records two events around each part of each micro-step, and waits for the
    device at the end of every ``step()`` to read them, whoever looks. Here ``engine.timers`` gives out timers that do
    nothing unless they are asked for, which :class:`lightning_zero3.Zero3Monitor` does for the batches of a logged
    step, so validation's forwards aren't timed either; and they are read, and waited for, at the step's end only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_zero3.metrics import names

# DeepSpeed's timer (deepspeed/utils/timer.py, runtime/zero/stage3.py) → our metric.
_OF_MICRO_STEP = {
    "step_microstep": names.STEP_MICROSTEP,
    "fwd_microstep": names.FWD_MICROSTEP,
    "bwd_microstep": names.BWD_MICROSTEP,
    "optimizer_step": names.OPTIMIZER_STEP,
}
_OF_WHOLE_STEP = {
    "fwd": names.FWD,
    "bwd": names.BWD,
    "bwd_inner": names.BWD_INNER,
    "bwd_allreduce": names.BWD_ALLREDUCE,
}
_MICRO_STEPS_ENDING = "_microstep"
_FORWARD_TIMERS = ("fwd_microstep", "fwd")


def on_demand_timers() -> type[Any]:
    """The class of timers that do nothing unless ``running``; see Note [When DeepSpeed's timers cost].

    Upstream symbol: ``SynchronizedWallClockTimer``, made by the engine's constructor and handed on to the optimizer
    (0.19.7, 0.19.8). Its ``log`` prints past any logging level, and reads; here it does nothing. Detected by
    :data:`lightning_zero3.capabilities.limits.TIMERS_IN_EVERY_STEP`. Expires when an engine can be told which steps to
    time.
    """
    from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer

    class OnDemandTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
        """DeepSpeed's timers, which start only while ``running``."""

        running = False

        def __init__(self) -> None:
            super().__init__()
            self._nothing = NoopTimer()

        def __call__(self, name: str) -> Any:
            return super().__call__(name) if self.running else self._nothing(name)

        def log(self, *_: Any, **__: Any) -> None:
            """Nothing: neither read nor printed."""

    return OnDemandTimers


def read_at_steps_end(engine: Any) -> None:
    """Have an engine with on-demand timers read them where a logged step ends, and nowhere else.

    Upstream symbols: ``DeepSpeedEngine._update_wall_clock_timers``, which reads after every micro-step, and
    ``print_forward_breakdown``, a line for each step of a model with AutoEP's layers (0.19.7, 0.19.8). Replaced on this
    engine only.

    Args:
        engine: A DeepSpeed engine that was built with :func:`on_demand_timers`.
    """

    def snapshot() -> None:
        engine.engine_timers_cache = {}
        if engine.timers.running and engine.is_gradient_accumulation_boundary():
            known = engine.timers.get_timers()
            engine.engine_timers_cache = {name: timer.elapsed(reset=False) for name, timer in known.items()}
            engine.timers.running = False  # what is left of step() would read once more, to print

    engine._update_wall_clock_timers = snapshot
    engine.print_forward_breakdown = lambda *_, **__: None


def start_timing(engine: Any, *, new_step: bool) -> None:
    """Before a batch of a step that will be logged: let the timers run, from zero.

    Args:
        engine: A DeepSpeed engine, or any other module.
        new_step: Whether the batch is the step's first.
    """
    timers: Any = getattr(engine, "timers", None)
    if not hasattr(timers, "running"):
        return
    for name, timer in timers.get_timers().items():
        if new_step or name.endswith(_MICRO_STEPS_ENDING):
            timer.reset()
    timers.running = True


def stop_timing(engine: Any) -> None:
    """After such a batch: what follows (validation, batches of other steps) isn't timed.

    Args:
        engine: A DeepSpeed engine, or any other module.
    """
    timers: Any = getattr(engine, "timers", None)
    if hasattr(timers, "running"):
        timers.running = False


def read_engine_timers(engine: Any, *, whole_step: bool = True) -> dict[str, float]:
    """Read the timers of the step that an engine has just finished.

    Upstream: ``DeepSpeedEngine.get_wall_clock_timers``, a snapshot that ``step()`` makes where
    ``wall_clock_breakdown`` is on.

    Args:
        engine: A DeepSpeed engine, or any other module.
        whole_step: Whether all of the step's micro-steps have been timed.

    Returns:
        Metric name → milliseconds; empty where nothing is timed.
    """
    snapshot: Mapping[str, float] = getattr(engine, "get_wall_clock_timers", dict)()
    wanted = {**_OF_MICRO_STEP, **(_OF_WHOLE_STEP if whole_step else {})}
    return {metric: float(snapshot[timer]) for timer, metric in wanted.items() if timer in snapshot}


def discard_forward_times(engine: Any) -> None:
    """Forget forward passes that were no training, where the user's own config has the timers run in every step.

    Upstream: ``DeepSpeedEngine.timers``. An engine times every forward and resets in ``step()`` only.

    Args:
        engine: A DeepSpeed engine, or any other module.
    """
    timers: Any = getattr(engine, "timers", None)
    known = timers.get_timers() if hasattr(timers, "get_timers") else {}
    for name in _FORWARD_TIMERS:
        if name in known:
            known[name].reset()
