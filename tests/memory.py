# SPDX-License-Identifier: Apache-2.0
"""The most memory that a block has taken: by the tensors that lived in it, and by the process's resident pages."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.step_arms import PeakBytes

_M_MMAP_THRESHOLD = -3
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Bytes beyond those at the start; filled in when the block ends.

    Args:
        tensors: The most bytes of live tensor storage after any operation.
        resident: The most resident memory, as the kernel counts it.
    """

    tensors: int = 0
    resident: int = 0


@contextmanager
def peak_of_tensors() -> Iterator[Peak]:
    """Count the storages that live after each operation; each once, however many tensors view it."""
    peak = Peak()
    with PeakBytes() as counted:
        yield peak
    peak.tensors = counted.peak


@contextmanager
def peak_of_resident_memory() -> Iterator[Peak]:
    """Read the kernel's high-water mark, set back at the start, when freed memory is given back too."""
    peak = Peak()
    gc.collect()
    libc = ctypes.CDLL(None)
    # What is freed goes back to the kernel at once, instead of being kept for the next allocation.
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    libc.malloc_trim(0)
    _RESET.write_text("5")
    before = _kilobytes("VmRSS")
    yield peak
    peak.resident = (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
