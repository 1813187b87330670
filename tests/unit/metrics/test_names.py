# SPDX-License-Identifier: Apache-2.0
"""The table of metrics: complete, without doubles, with names that tell the unit, and in the docs."""

from collections import Counter
from pathlib import Path

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.names import BY_NAME, METRICS, MetricEntry, spread_of
from lightning_zero3.metrics.step_values import StepValues

SUFFIXES = {
    "_ms": "ms",
    "_us_per_visit": "µs",
    "_gib": "GiB",
    "_per_second": "1/s",
    "_per_device": "1/s",
    "_rank": "rank",
}
# Counts and ratios have no unit in their names.
WITHOUT = {"parameters", "collectives", "steps", "sub-groups", "retries", "experts", "1"}
# The loss is the user's own metric, the prefixes no metrics.
NO_METRICS = ("LOSS", "MEMORY_PREFIX", "SPREAD_PREFIX")
EACH = pytest.mark.parametrize("entry", METRICS, ids=lambda entry: entry.name)
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
# Those that others call by name.
FIXED = {
    "step": ["step_microstep_ms", "fwd_microstep_ms", "bwd_microstep_ms", "total_ms", "tokens_per_second", "mfu"],
    "memory": ["peak_allocated_gib", "peak_reserved_gib", "allocated_between_steps_gib", "host_rss_gib"],
    "optim": ["grad_norm", "sub_groups", "collectives_per_step", "grad_clear_visits", "grad_clear_live"],
    "moe": ["expert_entropy", "expert_load_max_over_mean", "dead_experts"],
}
ALSO_FIXED = {"optim/skipped_steps", "step/data_wait_ms", "memory/allocator_retries"}


def test_names_that_others_call_are_there() -> None:
    assert {f"{group}/{name}" for group, names_of in FIXED.items() for name in names_of} <= BY_NAME.keys()
    assert BY_NAME.keys() >= ALSO_FIXED


@EACH
def test_every_entry_is_on_the_page(entry: MetricEntry) -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{entry.name}`"))
    assert all(cell in row for cell in (entry.unit, entry.definition, entry.measured))


def test_names_and_labels_are_unique() -> None:
    assert max(Counter(entry.name for entry in METRICS).values()) == 1
    assert max(Counter(entry.label for entry in METRICS).values()) == 1


def test_every_constant_is_in_the_table() -> None:
    public = {name: value for name, value in vars(names).items() if name.isupper() and not name.startswith("_")}
    constants = {name: value for name, value in public.items() if isinstance(value, str)}
    assert set(NO_METRICS) <= constants.keys()
    logged = {value for name, value in constants.items() if name not in NO_METRICS}
    spreads = {each.name for entry in METRICS if entry.spread for each in spread_of(entry)}
    assert logged | spreads == BY_NAME.keys()


def test_entries_are_found_by_name() -> None:
    assert {entry.name: entry for entry in METRICS} == BY_NAME


@EACH
def test_the_unit_is_the_names_ending(entry: MetricEntry) -> None:
    named = [unit for suffix, unit in SUFFIXES.items() if entry.name.endswith(suffix)]
    assert named == ([] if entry.unit in WITHOUT else [entry.unit])


@EACH
def test_the_group_says_what_is_measured(entry: MetricEntry) -> None:
    # Loggers draw one group of charts per prefix.
    group, slash, rest = entry.name.partition("/")
    assert slash
    assert rest
    assert group in {"step", "memory", "optim", "moe", "ranks"}
    assert entry.name.startswith(names.SPREAD_PREFIX) is (entry.over_ranks in ("minimum", "rank"))
    assert not (entry.name.startswith(names.MEMORY_PREFIX) and entry.unit not in ("GiB", "retries"))
    assert entry.per_layer is (group == "moe")


@EACH
def test_times_and_memory_are_the_largest_and_tell_their_spread(entry: MetricEntry) -> None:
    # The slowest rank's time and the fullest rank's memory decide; tokens are everybody's.
    if not entry.name.startswith(names.SPREAD_PREFIX):
        assert entry.spread is (entry.unit in ("ms", "GiB"))
        assert (entry.over_ranks == "sum") is (entry.unit == "1/s" or entry.name == names.MFU)
        assert not entry.spread or entry.over_ranks == "maximum"


@EACH
def test_every_entry_is_explained(entry: MetricEntry) -> None:
    assert entry.definition.endswith((".", ")."))
    assert "|" not in entry.definition
    assert entry.label
    assert entry.measured


def test_a_metric_that_is_not_in_the_table_is_not_logged() -> None:
    values = StepValues(metrics={names.STEP_TOTAL: 1.0, "step/unheard_of_ms": 2.0})
    with pytest.raises(KeyError, match="unheard_of"):
        values.over_ranks("cpu", 1)
