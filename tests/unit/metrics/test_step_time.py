# SPDX-License-Identifier: Apache-2.0
"""The clock around optimizer steps, on a clock of our own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero3.metrics import names
from lightning_zero3.metrics.step_time import StepClock


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
