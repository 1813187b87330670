# SPDX-License-Identifier: Apache-2.0
"""The statistics of a comparison, against their definitions in exact arithmetic and against scipy."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_zero3.compare.statistics import Agreement, agreement, difference, welch, within

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))
SAMPLES = st.lists(NUMBERS, min_size=2, max_size=20)
LOSSES = st.dictionaries(st.integers(0, 6), st.floats(0, 20, width=32), max_size=6)


def exactly(a: list[float], b: list[float]) -> tuple[float, float]:
    """Welch's t and Welch and Satterthwaite's degrees of freedom, in fractions up to the root."""
    means, parts = [], []
    for values in (a, b):
        numbers = [Fraction(value) for value in values]
        mean = sum(numbers) / len(numbers)
        variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
        means.append(mean)
        parts.append((variance / len(numbers), len(numbers)))
    error = sum(part for part, _ in parts)
    df = error**2 / sum(part**2 / (count - 1) for part, count in parts)
    return float(means[0] - means[1]) / math.sqrt(error), float(df)


@given(SAMPLES, SAMPLES)
def test_welch_is_its_definition_and_scipys(a, b):
    t, df = welch(a, b)
    if len(set(a)) == len(set(b)) == 1:
        assert (t, df) == (None, None)
        return
    # The variances' own rounding, where values differ in their last digits only.
    scale = max(map(abs, a + b))
    if any(1e-6 * scale > max(values) - min(values) > 0 for values in (a, b)):
        return
    assert (t, df) == (pytest.approx(exactly(a, b)[0], rel=1e-6, abs=1e-6), pytest.approx(exactly(a, b)[1], rel=1e-6))
    theirs = stats.ttest_ind(a, b, equal_var=False)
    assert (t, df) == (theirs.statistic, theirs.df)


@given(SAMPLES, SAMPLES)
def test_a_difference_turned_round_is_its_opposite(a, b):
    there, back = difference(a, b), difference(b, a)
    assert there.saved == -back.saved
    assert (there.min_a, there.max_a, there.n_a) == (back.min_b, back.max_b, back.n_b)
    assert there.t == (None if back.t is None else pytest.approx(-back.t))
    assert there.ranges_overlap is back.ranges_overlap
    inside = any(min(a) <= value <= max(a) for value in b) or any(min(b) <= value <= max(b) for value in a)
    # One range may lie within a gap of the other.
    assert there.ranges_overlap is (inside or min(a) <= min(b) <= max(a) or min(b) <= min(a) <= max(b))


def test_one_value_and_constants_have_no_t():
    assert difference([3.0], [1.0, 2.0]).t is None
    constant = difference([100_695.0] * 9, [735.0] * 9)
    assert (constant.saved, constant.t, constant.df, constant.is_clear) == (99_960, None, None, True)
    assert not difference([5.0] * 9, [5.0] * 9).is_clear
    assert not difference([5.0], [4.0]).is_clear


def test_a_value_that_is_no_number_leaves_no_difference():
    found = difference([1.0, math.nan], [1.0, 2.0])
    assert (found.mean_a, found.mean_b, found.saved, found.t, found.ranges_overlap) == (None, 1.5, None, None, None)
    assert (found.n_a, found.n_b) == (2, 2)


@given(LOSSES, LOSSES)
def test_agreement_is_the_largest_difference_after_the_first_common_step(a, b):
    found = agreement([(a, b)])
    common = sorted(a.keys() & b.keys())
    assert found.largest_difference == max((abs(a[step] - b[step]) for step in common[1:]), default=None)
    if common and min(a) == min(b):
        assert found.step1_identical is (a[common[0]] == b[common[0]])
    else:
        assert found.step1_identical is None
    assert agreement([(a, a)]).largest_difference in (0, None)


def test_losses_that_are_no_number():
    nan = math.nan
    assert agreement([({0: 1.0, 1: nan}, {0: 1.0, 1: 2.0})]) == Agreement(True, None, None, (2,))
    assert agreement([({0: nan, 1: 1.5}, {0: nan, 1: 1.0})]) == Agreement(True, 0.5, 2, (1,))


def test_runs_of_one_side_are_compared_in_pairs():
    runs = [{0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.5}, {0: 1.0, 1: 1.0}]
    assert len(within(runs)) == 3
    assert agreement(within(runs)).largest_difference == 1.5
    assert within(runs[:1]) == []
    assert agreement([]) == Agreement()
