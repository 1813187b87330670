# SPDX-License-Identifier: Apache-2.0
"""A profile's arithmetic, on events made by hand; what a GPU's events would give, without one."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch._C._autograd import DeviceType

from lightning_zero3.metrics.profile_figures import Recorded, figures, read
from lightning_zero3.metrics.profile_regions import WHOLE_STEP, Counted
from lightning_zero3.metrics.profile_table import Profile, as_numbers, markdown, show

WHOLE, FORWARD, STEP = (WHOLE_STEP,), (WHOLE_STEP, "forward"), (WHOLE_STEP, "step")
CLEAR = (*STEP, "clear")
COUNTED = {CLEAR: Counted(4, 0, 8), STEP: Counted(2, 6, None), FORWARD: Counted(2, 2, 0), WHOLE: Counted(2, 8, None)}
LABELS = {"ProfilerStep#5": WHOLE, "ProfilerStep#6": WHOLE, "f": FORWARD, "s": STEP, "c": CLEAR}


def event(name: str, start: float, end: float, number: int = 0, device: Any = DeviceType.CPU, **other: Any) -> Any:
    fields = {"is_user_annotation": name in LABELS, "is_async": False, "cpu_children": [], **other}
    return SimpleNamespace(
        name=name,
        trace_name=name,
        id=number,
        device_type=device,
        time_range=SimpleNamespace(start=start, end=end),
        **fields,
    )


def of_two_steps() -> list[Any]:
    """Each step: a forward that launches a kernel of 300 µs, a step that launches 2 of 10 µs; they run late."""
    events = []
    for number, at in enumerate((0.0, 1000.0)):
        gpu, ids = DeviceType.CUDA, range(10 * number, 10 * number + 3)
        events += [
            event(f"ProfilerStep#{5 + number}", at, at + 900),
            event("f", at + 10, at + 100),
            event("aten::linear", at + 20, at + 60, 1, cpu_children=[1]),
            event("aten::mm", at + 30, at + 50, 2),
            event("cudaLaunchKernel", at + 35, at + 40, ids[0]),
            event("gemm", at + 200, at + 500, ids[0], gpu),
            event("s", at + 110, at + 800),
            event("c", at + 120, at + 220),
            event("c", at + 230, at + 300),
            event("custom::fill", at + 125, at + 130, 3),
            # On another thread, as autograd's own is; within the time of the phase.
            event("cuLaunchKernel", at + 240, at + 245, ids[1]),
            event("cudaMemcpyAsync", at + 400, at + 405, ids[2]),
            event("triton", at + 1000 + 300, at + 1000 + 310, ids[1], gpu),  # in the next step's time
            event("Memcpy DtoD", at + 500, at + 510, ids[2], gpu),
            # The device's copy of a region is no kernel.
            event("s", at + 300, at + 500, 4, gpu),
        ]
    return events


def test_what_a_device_does_counts_where_the_host_launched_it():
    recorded = read(SimpleNamespace(events=of_two_steps), LABELS, on_device=True, memory=False)
    found = {figure.path: figure for figure in figures(recorded, COUNTED)}
    assert list(found) == [WHOLE, FORWARD, STEP, CLEAR]
    device = {path: (figure.kernels, figure.device_ms) for path, figure in found.items()}
    assert device == {
        WHOLE: (3, pytest.approx(0.32)),
        FORWARD: (1, pytest.approx(0.3)),
        STEP: (2, pytest.approx(0.02)),
        CLEAR: (1, pytest.approx(0.01)),
    }
    host = {path: (figure.calls, figure.cpu_ms, figure.cpu_operations) for path, figure in found.items()}
    assert host == {
        WHOLE: (1, pytest.approx(0.9), 2),
        FORWARD: (1, pytest.approx(0.09), 1),
        STEP: (1, pytest.approx(0.69), 1),
        CLEAR: (2, pytest.approx(0.17), 1),
    }
    counted = {path: (figure.collectives, figure.parameter_visits) for path, figure in found.items()}
    assert counted == {WHOLE: (4, None), FORWARD: (1, 0), STEP: (3, None), CLEAR: (0, 4)}


def test_without_a_device_there_is_no_time_of_it_and_never_a_zero():
    host = [each for each in of_two_steps() if each.device_type == DeviceType.CPU and "Launch" not in each.name]
    recorded = read(SimpleNamespace(events=lambda: host), LABELS, on_device=False, memory=False)
    found = figures(recorded, COUNTED)
    assert {(figure.device_ms, figure.kernels, figure.memory_peak_mib) for figure in found} == {(None, None, None)}
    profile = Profile((5, 6), 0, 2, None, found, "rank_0.pt.trace.json.gz")
    assert {phase["device_ms"] for phase in as_numbers(profile)["phases"]} == {None}
    lines = [line for line in markdown(profile).splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 4
    assert all("| no device |" in line for line in lines)
    assert "CPU ops" in markdown(profile)
    assert "kernels |" not in markdown(profile)


def test_memory_is_held_against_that_at_a_phases_start():
    mib = 2**20
    regions = [
        (WHOLE, 0, 100),
        (FORWARD, 10, 40),
        (STEP, 50, 90),
        (WHOLE, 200, 300),
        (FORWARD, 210, 240),
        (STEP, 250, 290),
    ]
    changes = [(5, 7 * mib), (15, 4 * mib), (20, -3 * mib), (60, 2 * mib), (70, -2 * mib), (255, 6 * mib)]
    found = {figure.path: figure for figure in figures(Recorded(regions, [], [], False, changes), COUNTED)}
    assert (found[FORWARD].memory_peak_mib, found[FORWARD].memory_kept_mib) == (4, 0.5)
    assert (found[STEP].memory_peak_mib, found[STEP].memory_kept_mib) == (6, 3)
    assert found[WHOLE].memory_peak_mib == 11


@pytest.mark.parametrize("memory", [False, True])
def test_the_table_fits_a_narrow_terminal(memory):
    changes = [(15, 2**20)] if memory else None
    paths = [
        WHOLE,
        (*WHOLE, "engine step"),
        (*WHOLE, "engine step", "optimizer step", "merged update", "chunk's gradients"),
    ]
    recorded = Recorded([(path, 0, 5e6) for path in paths], [1.0] * 99_999, [], False, changes)
    profile = Profile((5, 6), 0, 2, None, figures(recorded, {WHOLE: Counted(1, 12_345, 100_695)}), "trace")
    console = Console(width=80, file=io.StringIO())
    show(profile, console)
    printed = console.file.getvalue()
    for text in ("5,000.00", "99,999", "12,345", "100,695", "chunk's gradients", "collectives", "no device", "CPU ops"):
        assert text in printed
    assert ("peak MiB" in printed) is memory
    assert "…" not in printed
