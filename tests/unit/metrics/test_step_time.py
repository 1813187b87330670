"""The clock around optimizer steps, on a clock of our own; and DeepSpeed's timers, on real ones."""

from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.utils import timer as upstream
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_zero3.metrics import names
from lightning_zero3.metrics.step_time import StepClock, discard_forward_times, read_engine_timers


class Seconds:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def times(total: float, waited: float) -> dict[str, float]:
    """In seconds here, in milliseconds there."""
    return pytest.approx({names.STEP_TOTAL: total * 1e3, names.DATA_WAIT: waited * 1e3})


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def clock(seconds: Seconds) -> StepClock:
    clock = StepClock(now=seconds)
    clock.restart()
    return clock


def micro_step(clock: StepClock, seconds: Seconds, waiting: float, computing: float, *, last: bool) -> dict[str, float]:
    seconds.pass_by(waiting)
    clock.batch_starts()
    seconds.pass_by(computing)
    if last:
        return clock.step_ends()
    clock.batch_ends()
    return {}


def test_a_step_of_one_batch(clock: StepClock, seconds: Seconds) -> None:
    assert micro_step(clock, seconds, 2, 5, last=True) == times(7, 2)


def test_steps_follow_one_another_without_a_gap(clock: StepClock, seconds: Seconds) -> None:
    micro_step(clock, seconds, 2, 5, last=True)
    assert micro_step(clock, seconds, 3, 4, last=True) == times(7, 3)
    assert micro_step(clock, seconds, 0, 1, last=True) == times(1, 0)


def test_accumulated_batches_are_one_step_and_their_waits_add_up(clock: StepClock, seconds: Seconds) -> None:
    assert micro_step(clock, seconds, 2, 10, last=False) == {}
    assert micro_step(clock, seconds, 3, 10, last=False) == {}
    assert micro_step(clock, seconds, 4, 10, last=True) == times(39, 9)


def test_callbacks_after_a_batch_count_as_waiting_and_in_the_whole(clock: StepClock, seconds: Seconds) -> None:
    micro_step(clock, seconds, 0, 1, last=False)
    seconds.pass_by(6)  # something between the end of this batch and the arrival of the next
    assert micro_step(clock, seconds, 1, 1, last=True) == times(9, 7)


def test_what_comes_before_a_restart_is_no_part_of_the_step(clock: StepClock, seconds: Seconds) -> None:
    micro_step(clock, seconds, 1, 1, last=True)
    seconds.pass_by(500)  # validation
    clock.restart()
    assert micro_step(clock, seconds, 2, 5, last=True) == times(7, 2)


def test_a_restart_forgets_the_waits_of_an_unfinished_step(clock: StepClock, seconds: Seconds) -> None:
    micro_step(clock, seconds, 50, 1, last=False)
    clock.restart()
    assert micro_step(clock, seconds, 2, 5, last=True) == times(7, 2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans()), min_size=1, max_size=20))
def test_steps_add_up_to_the_time_that_passed(micro_steps: list[tuple[float, float, bool]]) -> None:
    seconds = Seconds()
    clock = StepClock(now=seconds)
    clock.restart()
    began = seconds.now
    steps = []
    for position, (waiting, computing, last) in enumerate(micro_steps):
        done = micro_step(clock, seconds, waiting, computing, last=last or position == len(micro_steps) - 1)
        steps += [done] if done else []
    waited = sum(waiting for waiting, _, _ in micro_steps)
    assert sum(step[names.STEP_TOTAL] for step in steps) == pytest.approx((seconds.now - began) * 1e3, abs=1e-6)
    assert sum(step[names.DATA_WAIT] for step in steps) == pytest.approx(waited * 1e3, abs=1e-6)
    for step in steps:
        assert 0 <= step[names.DATA_WAIT] <= step[names.STEP_TOTAL] + 1e-6


# --- DeepSpeed's timers ---


@pytest.mark.parametrize("module", [nn.Linear(2, 2), SimpleNamespace(), None], ids=repr)
def test_what_is_no_engine_has_no_timers_to_read_or_reset(module: object) -> None:
    assert read_engine_timers(module) == {}
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
    assert read == {names.STEP_MICROSTEP: 1.5, names.FWD_MICROSTEP: 2.0, names.BWD_MICROSTEP: 3.5}
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
