# SPDX-License-Identifier: Apache-2.0
"""What a profile says of each phase: host time, device time, kernels, collectives, visits, memory. Arithmetic only."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero3.metrics.profile_regions import WHOLE_STEP, Counted

# How the runtimes' calls begin that launch what a device does; the profiler gives both one number.
_LAUNCHES = ("cuda", "cuLaunch", "hip")
_MEMORY_EVENT = "[memory]"
_MIB = 2**20


@dataclass(frozen=True)
class Recorded:
    """What was recorded, in µs since the profile's start.

    Args:
        regions: Phase, start and end of each region.
        operations: Start of each torch operation that calls no other.
        kernels: For each kernel or copy on the device, when the host launched it and how long it ran.
        on_device: Whether a device was watched; without one there are no kernels, which is not the same as none.
        memory: Time and bytes of each allocation and (negative) release in the device's memory, or the host's; None
            where it wasn't recorded.
    """

    regions: Sequence[tuple[tuple[str, ...], float, float]]
    operations: Sequence[float]
    kernels: Sequence[tuple[float, float]]
    on_device: bool
    memory: Sequence[tuple[float, int]] | None = None


@dataclass(frozen=True)
class PhaseFigures:
    """One phase, what it calls included; means over the profiled steps.

    Args:
        path: The phase, after those that it lies in.
        calls: How often it was entered.
        cpu_ms: Host time from its start to its end, waiting included.
        device_ms: Time of what it launched on the device, added up; None without a device.
        kernels: Kernels and copies that it launched; None without a device.
        cpu_operations: Torch operations that call no other, on the host.
        collectives: Collectives that DeepSpeed launched.
        parameter_visits: Parameters that clears and the release visited; None where nobody counts.
        memory_peak_mib: Most memory over that at its start, of all its calls; None where not recorded.
        memory_kept_mib: Memory at its end less that at its start; None where not recorded.
    """

    path: tuple[str, ...]
    calls: float
    cpu_ms: float
    device_ms: float | None
    kernels: float | None
    cpu_operations: float
    collectives: float
    parameter_visits: float | None
    memory_peak_mib: float | None
    memory_kept_mib: float | None


def read(profile: Any, labels: Mapping[str, tuple[str, ...]], *, on_device: bool, memory: bool) -> Recorded:
    """What torch's profiler has recorded.

    Upstream symbols: ``FunctionEvent``'s fields, and ``kineto_results`` for memory (torch 2.8 to 2.13).

    Args:
        profile: A stopped ``torch.profiler.profile``.
        labels: See :class:`~lightning_zero3.metrics.profile_regions.Regions`.
        on_device: Whether the device's activities were watched.
        memory: Whether memory was.
    """
    from torch._C._autograd import DeviceType

    regions, operations, launches, ran = [], [], {}, []
    for event in profile.events():
        start, end = event.time_range.start, event.time_range.end
        name = event.trace_name or event.name  # the latter has no number of the step
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                ran.append((event.id, start, end - start))
        elif name in labels:
            regions.append((labels[name], start, end))
        elif name.startswith(_LAUNCHES):
            launches[event.id] = start
        elif not (event.is_user_annotation or event.is_async or event.cpu_children or name == _MEMORY_EVENT):
            operations.append(start)
    kernels = [(launches.get(number, start), took) for number, start, took in ran]
    changes = None
    if memory:
        results = profile.profiler.kineto_results
        wanted, began = DeviceType.CUDA if on_device else DeviceType.CPU, results.trace_start_ns()
        changes = [
            ((event.start_ns() - began) / 1e3, event.nbytes())
            for event in results.events()
            if event.name() == _MEMORY_EVENT and event.device_type() == wanted
        ]
    return Recorded(regions, operations, kernels, on_device, changes)


def figures(recorded: Recorded, counted: Mapping[tuple[str, ...], Counted]) -> list[PhaseFigures]:
    """Each phase's figures, a phase before what lies in it, otherwise in the order of a step.

    What the device does belongs to the phase in which the host launched it, on whichever thread.

    Args:
        recorded: What the profiler has seen.
        counted: What :class:`~lightning_zero3.metrics.profile_regions.Regions` has counted.
    """
    operations = sorted(recorded.operations)
    kernels = sorted(recorded.kernels)
    launched = [start for start, _ in kernels]
    ran = list(itertools.accumulate((took for _, took in kernels), initial=0.0))
    changes = sorted(recorded.memory or ())
    changed = [time for time, _ in changes]
    held = list(itertools.accumulate((size for _, size in changes), initial=0))
    spans: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    # Those that contain others begin no later and end no earlier, so they come first.
    for path, start, end in sorted(recorded.regions, key=lambda region: (region[1], -region[2])):
        spans.setdefault(path, []).append((start, end))
    steps = max(1, counted[(WHOLE_STEP,)].calls if (WHOLE_STEP,) in counted else 1)

    def of(path: tuple[str, ...]) -> PhaseFigures:
        seen, within = counted.get(path, Counted()), spans[path]
        whole = sum(end - start for start, end in within)
        at = [(bisect_left(launched, start), bisect_left(launched, end)) for start, end in within]
        memory = [(bisect_left(changed, start), bisect_left(changed, end)) for start, end in within]
        peak = max((max(held[first : last + 1]) - held[first] for first, last in memory), default=0)
        kept = sum(held[last] - held[first] for first, last in memory)
        return PhaseFigures(
            path=path,
            calls=len(within) / steps,
            cpu_ms=whole / 1e3 / steps,
            device_ms=sum(ran[last] - ran[first] for first, last in at) / 1e3 / steps if recorded.on_device else None,
            kernels=sum(last - first for first, last in at) / steps if recorded.on_device else None,
            cpu_operations=sum(bisect_left(operations, end) - bisect_left(operations, start) for start, end in within)
            / steps,
            collectives=seen.collectives / steps,
            parameter_visits=None if seen.visits is None else seen.visits / steps,
            memory_peak_mib=None if recorded.memory is None else peak / _MIB,
            memory_kept_mib=None if recorded.memory is None else kept / _MIB / steps,
        )

    return [of(path) for path in _parents_first(spans)]


def _parents_first(paths: Mapping[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Paths as a tree is read; those of one parent as they come.

    >>> _parents_first(dict.fromkeys([("a",), ("a", "b"), ("a", "c"), ("a", "b", "d")]))
    [('a',), ('a', 'b'), ('a', 'b', 'd'), ('a', 'c')]
    """
    place = {path: number for number, path in enumerate(paths)}
    return sorted(paths, key=lambda path: [place.get(path[: depth + 1], -1) for depth in range(len(path))])
