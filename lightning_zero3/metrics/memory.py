# SPDX-License-Identifier: Apache-2.0
"""Memory of one process, in GiB: the GPU's by its allocator, the host's by the kernel."""

from __future__ import annotations

import os
import resource
import sys
from functools import lru_cache

import psutil
import torch

from lightning_zero3.metrics import names

GIB = 2**30


def read_memory(device: torch.device) -> dict[str, float]:
    """Read this process's memory metrics.

    Args:
        device: The training device. Only CUDA devices have GPU metrics; on a CPU the host's stand alone.

    Returns:
        Metric name → GiB, or a count. On CUDA the allocator's peaks are reset, so the next call's peaks are of the
        span between.
    """
    resident = resident_bytes()
    # The kernel updates its high-water mark lazily: it may lag behind what is resident now.
    values = {names.HOST_RSS: resident / GIB, names.HOST_RSS_PEAK: max(resident, _peak_rss_bytes()) / GIB}
    if device.type == "cuda":
        values[names.PEAK_ALLOCATED] = torch.cuda.max_memory_allocated(device) / GIB
        values[names.PEAK_RESERVED] = torch.cuda.max_memory_reserved(device) / GIB
        values[names.ALLOCATED_BETWEEN_STEPS] = torch.cuda.memory_allocated(device) / GIB
        values[names.ALLOCATOR_RETRIES] = float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
        torch.cuda.reset_peak_memory_stats(device)
    return values


def memory_capacities(device: torch.device) -> dict[str, int]:
    """Memory that there is, for this process's GPU and its machine.

    Args:
        device: The training device.

    Returns:
        ``"host"``, and on CUDA ``"gpu"`` → bytes.
    """
    sizes = {"host": int(psutil.virtual_memory().total)}
    if device.type == "cuda":
        sizes["gpu"] = int(torch.cuda.get_device_properties(device).total_memory)
    return sizes


def resident_bytes() -> int:
    """Resident memory of this process."""
    rss: int = _this_process(os.getpid()).memory_info().rss
    return rss


@lru_cache(maxsize=1)
def _this_process(pid: int) -> psutil.Process:
    # Finding itself takes psutil a millisecond. A forked child is another process.
    return psutil.Process(pid)


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kibibytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
