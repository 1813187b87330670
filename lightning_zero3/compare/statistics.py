# SPDX-License-Identifier: Apache-2.0
"""The statistics of a comparison: pure arithmetic over lists of numbers.

Source: the report "_prepare_fp32_grad_for_sub_group clears every parameter's gradient once per sub-group", which
compares means, ranges and a t value over the steps after the first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from scipy import stats

from lightning_zero3.metrics.summary import spread

# Of a difference of means that is called clear: one in a hundred differences of pure noise would be as large.
SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Difference:
    """Two samples of one metric, in its unit. A value is None where there is no number for it.

    Args:
        mean_a: Mean of A's values; likewise the others.
        saved: ``mean_a - mean_b``: above 0 where B takes less.
        ranges_overlap: Whether a value of one lies between the smallest and the largest of the other.
        t: Welch's t, of the sign of ``saved``; None where a sample has one value, or no value differs from another.
        df: Its degrees of freedom, by Welch and Satterthwaite.
        n_a: Values of A.
    """

    mean_a: float | None
    mean_b: float | None
    min_a: float | None
    max_a: float | None
    min_b: float | None
    max_b: float | None
    saved: float | None
    ranges_overlap: bool | None
    t: float | None
    df: float | None
    n_a: int
    n_b: int

    @property
    def is_clear(self) -> bool:
        """Whether the means differ by more than chance explains, or the ranges don't even overlap."""
        if self.t is None or self.df is None:
            return self.ranges_overlap is False and min(self.n_a, self.n_b) > 1
        return 2 * float(stats.t.sf(abs(self.t), self.df)) < SIGNIFICANCE


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Compare two samples.

    Args:
        a: Values of A, at least one.
        b: Values of B, likewise.

    >>> found = difference([3.0, 5.0], [1.0, 2.0])
    >>> found.saved, found.ranges_overlap, round(found.t, 3), round(found.df, 3)
    (2.5, False, 2.236, 1.471)
    """
    of_a, of_b = spread(a), spread(b)
    assert of_a is not None
    assert of_b is not None
    if not all(map(math.isfinite, (*a, *b))):
        known = [
            [value if math.isfinite(value) else None for value in (of.mean, of.minimum, of.maximum)]
            for of in (of_a, of_b)
        ]
        (mean_a, min_a, max_a), (mean_b, min_b, max_b) = known
        return Difference(mean_a, mean_b, min_a, max_a, min_b, max_b, None, None, None, None, len(a), len(b))
    t, df = welch(a, b)
    overlap = of_a.minimum <= of_b.maximum and of_b.minimum <= of_a.maximum
    lows_and_highs = (of_a.minimum, of_a.maximum, of_b.minimum, of_b.maximum)
    return Difference(
        of_a.mean, of_b.mean, *lows_and_highs, of_a.mean - of_b.mean, overlap, t, df, of_a.count, of_b.count
    )


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, float | None]:
    """Welch's t and its degrees of freedom, for samples of unequal variances.

    Args:
        a: Values of A.
        b: Values of B.

    Returns:
        None for both where a sample has less than two values, or all values of each are the same.

    >>> welch([1.0, 1.0], [2.0, 2.0])
    (None, None)
    """
    if min(len(a), len(b)) < 2 or (len(set(a)) == 1 and len(set(b)) == 1):
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # values that are nearly the same
        result = stats.ttest_ind(a, b, equal_var=False)
    t, df = float(result.statistic), float(result.df)
    return (t, df) if math.isfinite(t) and math.isfinite(df) else (None, None)


@dataclass(frozen=True)
class Agreement:
    """How far values of the same steps are from each other, in several runs.

    Args:
        step1_identical: Whether all pairs have the same bits at the runs' first step; None where they begin at
            different steps, or there is no value.
        largest_difference: The largest of all later steps; None where there is none, or where one of two is no number.
        at_step: The step of that, Lightning's number and one.
        without_number: Steps (likewise) at which a run's value is NaN or infinite.
    """

    step1_identical: bool | None = None
    largest_difference: float | None = None
    at_step: int | None = None
    without_number: tuple[int, ...] = ()


def agreement(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> Agreement:
    """Compare values step by step.

    Args:
        pairs: {Lightning's step: value} of two runs each.

    >>> agreement([({0: 2.0, 1: 1.5, 2: 1.0}, {0: 2.0, 1: 1.5, 2: 1.25})])
    Agreement(step1_identical=True, largest_difference=0.25, at_step=3, without_number=())
    """
    identical: list[bool] = []
    largest, at_step, unbounded = None, None, False
    without = set()
    begin_alike = True
    for a, b in pairs:
        common = sorted(a.keys() & b.keys())
        begin_alike &= bool(common) and min(a) == min(b)
        for place, step in enumerate(common):
            alike = a[step] == b[step] or (math.isnan(a[step]) and math.isnan(b[step]))
            finite = math.isfinite(a[step]) and math.isfinite(b[step])
            if not finite:
                without.add(step + 1)
            if place == 0:
                identical.append(alike)
            elif finite and (largest is None or abs(a[step] - b[step]) > largest):
                largest, at_step = abs(a[step] - b[step]), step + 1
            elif not finite and not alike:
                unbounded = True
    if unbounded:
        largest, at_step = None, None
    return Agreement(all(identical) if identical and begin_alike else None, largest, at_step, tuple(sorted(without)))


def between(
    a: Sequence[Mapping[int, float]], b: Sequence[Mapping[int, float]]
) -> list[tuple[Mapping[int, float], Mapping[int, float]]]:
    """Each run of A with each of B.

    Args:
        a: Values of A's runs.
        b: Values of B's.
    """
    return list(product(a, b))


def within(runs: Sequence[Mapping[int, float]]) -> list[tuple[Mapping[int, float], Mapping[int, float]]]:
    """Each two runs of one side.

    Args:
        runs: Their values.
    """
    return list(combinations(runs, 2))
