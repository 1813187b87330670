# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's timers, on real ones: when they run, and what is read from them."""

from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.utils import timer as upstream
from torch import nn

from lightning_zero3.metrics import names
from lightning_zero3.metrics.engine_timers import (
    discard_forward_times,
    on_demand_timers,
    read_at_steps_end,
    read_engine_timers,
    start_timing,
    stop_timing,
)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), SimpleNamespace(), None], ids=repr)
def test_what_is_no_engine_has_no_timers_to_read_or_reset(module: object) -> None:
    assert read_engine_timers(module) == {}
    start_timing(module, new_step=True)
    stop_timing(module)
    discard_forward_times(module)


def test_the_snapshot_is_read_from_a_method_that_engines_have() -> None:
    assert callable(deepspeed.DeepSpeedEngine.get_wall_clock_timers)


def test_timers_are_read_under_deepspeeds_names() -> None:
    snapshot = {
        upstream.STEP_MICRO_TIMER: 1.5,
        upstream.FORWARD_MICRO_TIMER: 2,
        upstream.BACKWARD_MICRO_TIMER: 3.5,
        upstream.BACKWARD_REDUCE_MICRO_TIMER: 4.5,
        upstream.FORWARD_GLOBAL_TIMER: 5.5,
    }
    read = read_engine_timers(SimpleNamespace(get_wall_clock_timers=lambda: snapshot))
    micro_step = {names.STEP_MICROSTEP: 1.5, names.FWD_MICROSTEP: 2.0, names.BWD_MICROSTEP: 3.5}
    assert read == {**micro_step, names.FWD: 5.5}
    # Timed from the middle of a step on, its sums aren't the step's.
    engine = SimpleNamespace(get_wall_clock_timers=lambda: snapshot)
    assert read_engine_timers(engine, whole_step=False) == micro_step
    assert all(isinstance(value, float) for value in read.values())


def test_timers_that_did_not_run_are_left_out() -> None:
    # Before the first step, and after a micro-step without one.
    assert read_engine_timers(SimpleNamespace(get_wall_clock_timers=dict)) == {}
    only_forward = SimpleNamespace(get_wall_clock_timers=lambda: {upstream.FORWARD_MICRO_TIMER: 2.0})
    assert read_engine_timers(only_forward) == {names.FWD_MICROSTEP: 2.0}


FORWARD = (upstream.FORWARD_MICRO_TIMER, upstream.FORWARD_GLOBAL_TIMER)
OTHERS = (
    upstream.BACKWARD_MICRO_TIMER,
    upstream.BACKWARD_GLOBAL_TIMER,
    upstream.BACKWARD_INNER_MICRO_TIMER,
    upstream.BACKWARD_REDUCE_MICRO_TIMER,
    upstream.STEP_MICRO_TIMER,
    upstream.STEP_GLOBAL_TIMER,
)


def test_only_forward_times_are_discarded() -> None:
    timers = upstream.SynchronizedWallClockTimer()
    for name in (*FORWARD, *OTHERS):
        for _ in range(2):
            timers(name).start()
            timers(name).stop()
    discard_forward_times(SimpleNamespace(timers=timers))
    kept = {name: len(timer.event_timers) for name, timer in timers.get_timers().items()}
    assert kept == {**dict.fromkeys(FORWARD, 0), **dict.fromkeys(OTHERS, 2)}
    assert timers(upstream.FORWARD_MICRO_TIMER).elapsed() == 0


def test_a_forward_that_was_interrupted_can_be_timed_again() -> None:
    timers = upstream.SynchronizedWallClockTimer()
    timers(upstream.FORWARD_MICRO_TIMER).start()
    discard_forward_times(SimpleNamespace(timers=timers))
    timers(upstream.FORWARD_MICRO_TIMER).start()  # raises where one is running
    timers(upstream.FORWARD_MICRO_TIMER).stop()


def test_discarding_makes_no_timers() -> None:
    timers = upstream.SynchronizedWallClockTimer()
    timers(upstream.STEP_MICRO_TIMER)
    discard_forward_times(SimpleNamespace(timers=timers))
    assert list(timers.get_timers()) == [upstream.STEP_MICRO_TIMER]


def test_an_engine_that_times_nothing_is_left_alone() -> None:
    discard_forward_times(SimpleNamespace(timers=upstream.NoopTimer()))


class Engine:
    """What an engine does with its timers, and where it says that a step ends."""

    def __init__(self) -> None:
        self.timers = on_demand_timers()()
        self.boundary = True
        self.engine_timers_cache: dict[str, float] = {}
        read_at_steps_end(self)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary

    def get_wall_clock_timers(self) -> dict[str, float]:
        return self.engine_timers_cache

    def micro_step(self, boundary: bool = True) -> None:
        self.boundary = boundary
        for name in (*FORWARD, *OTHERS):
            self.timers(name).start()
            self.timers(name).stop(record=True)
        self._update_wall_clock_timers()  # type: ignore[attr-defined]
        self.timers.log(FORWARD)


def test_timers_do_nothing_until_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    engine.micro_step()
    assert engine.timers.get_timers() == {}
    assert read_engine_timers(engine) == {}
    start_timing(engine, new_step=True)
    engine.micro_step()
    seen = {names.STEP_MICROSTEP, names.FWD_MICROSTEP, names.BWD_MICROSTEP, names.FWD, names.BWD}
    assert set(read_engine_timers(engine)) == seen
    stop_timing(engine)
    engine.micro_step()
    assert read_engine_timers(engine) == {}
    assert not capsys.readouterr().out


def test_micro_step_timers_begin_anew_and_the_steps_go_on() -> None:
    engine = Engine()
    start_timing(engine, new_step=True)
    engine.micro_step(boundary=False)
    assert read_engine_timers(engine) == {}
    start_timing(engine, new_step=False)
    engine.micro_step(boundary=True)
    counts = {name: len(timer.event_timers) for name, timer in engine.timers.get_timers().items()}
    assert (counts[upstream.FORWARD_MICRO_TIMER], counts[upstream.FORWARD_GLOBAL_TIMER]) == (1, 2)
    start_timing(engine, new_step=True)
    assert {len(timer.event_timers) for timer in engine.timers.get_timers().values()} == {0}


def test_deepspeed_calls_what_is_replaced() -> None:
    from lightning_zero3.capabilities.limits import TIMERS_IN_EVERY_STEP

    assert TIMERS_IN_EVERY_STEP.present()
    assert callable(deepspeed.DeepSpeedEngine.print_forward_breakdown)
