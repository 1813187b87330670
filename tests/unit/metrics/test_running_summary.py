# SPDX-License-Identifier: Apache-2.0
"""A run summed up as it goes equals the same run summed up from its log."""

import math

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.running_summary import RunningSummary
from lightning_zero3.metrics.summary import summarise


def logged(steps: list[int]) -> dict[str, dict[int, float]]:
    return {
        names.LOSS: {step: 4.0 - step / 64 for step in steps},
        names.STEP_MICROSTEP: {step: 20.0 + step % 3 for step in steps},
        names.STEP_TOTAL: {step: 300.0 + step % 5 for step in steps},
        names.TOKENS_PER_SECOND: {step: 1000.0 + step % 7 for step in steps if step != 3},
        names.HOST_RSS: {step: 1.0 + step % 4 for step in steps},
        names.ALLOCATOR_RETRIES: dict.fromkeys(steps, 3.0),
    }


@pytest.mark.parametrize("steps", [[], [1], list(range(1, 30)), list(range(50, 500, 50)), list(range(7, 20))])
def test_the_same_as_from_the_log(steps: list[int]) -> None:
    metrics, running = logged(steps), RunningSummary()
    for step in steps:
        values = {name: each[step] for name, each in metrics.items() if step in each}
        running.add(step, {**values, names.LOSS_OF_STEP: values.pop(names.LOSS)})
    assert running.summary() == summarise({name: values for name, values in metrics.items() if values})


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    running = RunningSummary()
    for step, value in enumerate((1.0, 2.0, math.nan, 3.0), start=1):
        running.add(step, {names.STEP_TOTAL: value})
    total = running.summary().step_total
    assert total is not None
    assert math.isnan(total.mean)
    assert math.isnan(total.maximum)
