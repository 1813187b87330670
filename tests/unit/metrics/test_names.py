"""The table of metrics: complete, without doubles, and with names that tell the unit."""

from collections import Counter

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.names import BY_NAME, METRICS, MetricEntry

SUFFIXES = {"_ms": "ms", "_us_per_visit": "µs", "_gib": "GiB", "_per_second": "1/s"}
EACH = pytest.mark.parametrize("entry", METRICS, ids=lambda entry: entry.name)


def test_names_and_labels_are_unique() -> None:
    assert max(Counter(entry.name for entry in METRICS).values()) == 1
    assert max(Counter(entry.label for entry in METRICS).values()) == 1


def test_every_constant_is_in_the_table() -> None:
    # The loss is the user's own metric, the prefix no metric.
    constants = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert {"LOSS", "MEMORY_PREFIX"} <= constants.keys()
    logged = [value for name, value in constants.items() if name not in ("LOSS", "MEMORY_PREFIX")]
    assert sorted(logged) == sorted(entry.name for entry in METRICS)


def test_entries_are_found_by_name() -> None:
    assert {entry.name: entry for entry in METRICS} == BY_NAME


@EACH
def test_the_unit_is_the_names_ending(entry: MetricEntry) -> None:
    # A count has no unit in its name.
    named = [unit for suffix, unit in SUFFIXES.items() if entry.name.endswith(suffix)]
    assert named == ([] if entry.unit in ("parameters", "collectives", "steps") else [entry.unit])


@EACH
def test_the_group_says_what_is_measured(entry: MetricEntry) -> None:
    # Loggers draw one group of charts per prefix.
    group, slash, rest = entry.name.partition("/")
    assert slash
    assert rest
    groups = {"GiB": "memory", "parameters": "optim", "collectives": "optim", "µs": "optim", "steps": "optim"}
    assert group == groups.get(entry.unit, "step")
    assert entry.name.startswith(names.MEMORY_PREFIX) is (entry.unit == "GiB")


@EACH
def test_only_rates_are_summed_over_ranks(entry: MetricEntry) -> None:
    # The slowest rank's time and the fullest rank's memory decide; tokens are everybody's.
    assert entry.over_ranks == ("sum" if entry.unit == "1/s" else "maximum")


@EACH
def test_every_entry_is_explained(entry: MetricEntry) -> None:
    assert entry.definition.endswith((".", ")."))
    assert entry.label
