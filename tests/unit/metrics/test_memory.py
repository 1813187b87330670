# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, by a known allocation."""

from collections.abc import Iterator

import psutil
import pytest
import torch

from benchmarks.step_arms import PeakBytes
from lightning_zero3.metrics import names
from lightning_zero3.metrics.memory import GIB, read_memory

CPU = torch.device("cpu")
MIB = 2**20
# The kernel keeps both counts per CPU and adds them up now and then; each may be some pages off.
SLACK_MIB = 16


def mib(values: dict[str, float], name: str) -> float:
    return values[name] * GIB / MIB


def test_a_cpu_has_no_gpu_metrics() -> None:
    assert read_memory(CPU).keys() == {names.HOST_RSS, names.HOST_RSS_PEAK}


def test_a_known_allocation_moves_resident_memory_by_its_size() -> None:
    before = mib(read_memory(CPU), names.HOST_RSS)
    # ones writes to every page: memory that was only asked for isn't resident. 64 MiB is beyond what the C library
    # keeps of freed blocks, so these pages are new.
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    during = mib(read_memory(CPU), names.HOST_RSS)
    del held
    after = mib(read_memory(CPU), names.HOST_RSS)
    assert during - before == pytest.approx(64, abs=SLACK_MIB)
    assert during - after == pytest.approx(64, abs=SLACK_MIB)


def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    during = read_memory(CPU)
    del held
    after = read_memory(CPU)
    assert mib(after, names.HOST_RSS_PEAK) >= mib(during, names.HOST_RSS) - SLACK_MIB
    assert mib(after, names.HOST_RSS_PEAK) >= mib(after, names.HOST_RSS) + 64 - 2 * SLACK_MIB


def test_the_peak_is_never_below_what_is_resident() -> None:
    held = []
    for _ in range(8):
        held.append(torch.ones(4 * MIB, dtype=torch.uint8))
        values = read_memory(CPU)
        assert values[names.HOST_RSS_PEAK] >= values[names.HOST_RSS]


def test_values_are_gib_of_this_process() -> None:
    values = read_memory(CPU)
    resident = psutil.Process().memory_info().rss / MIB
    assert mib(values, names.HOST_RSS) == pytest.approx(resident, abs=SLACK_MIB)
    # The kernel counts the peak in KiB on Linux and in bytes on macOS: a wrong factor is off by a thousand.
    assert resident - SLACK_MIB < mib(values, names.HOST_RSS_PEAK) < 100 * resident


def test_every_name_is_in_the_table_as_memory() -> None:
    for name in read_memory(CPU):
        assert names.BY_NAME[name].unit == "GiB"
        assert name.startswith(names.MEMORY_PREFIX)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """torch.cuda's memory functions, answering with the bytes of this process's real tensors, after each operation."""
    with PeakBytes() as counted:

        def now(_: torch.device) -> int:
            return counted._total() - counted._start

        def forget_peak(device: torch.device) -> None:
            counted.peak = now(device)

        monkeypatch.setattr(torch.cuda, "memory_allocated", now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counted.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 2 * counted.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget_peak)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
        yield torch.device("cuda", 0)


def test_a_gpus_peak_moves_by_a_known_allocation_and_is_of_the_span_between(gpu: torch.device) -> None:
    read_memory(gpu)
    held = torch.ones(3 * MIB, dtype=torch.uint8)
    gone = torch.ones(5 * MIB, dtype=torch.uint8)
    del gone
    values = read_memory(gpu)
    assert mib(values, names.PEAK_ALLOCATED) == 8
    assert mib(values, names.PEAK_RESERVED) == 16
    assert mib(values, names.ALLOCATED_BETWEEN_STEPS) == 3
    assert values[names.ALLOCATOR_RETRIES] == 3
    # What was freed before isn't in the next span's peak.
    assert mib(read_memory(gpu), names.PEAK_ALLOCATED) == 3
    del held
