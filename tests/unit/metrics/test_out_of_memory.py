# SPDX-License-Identifier: Apache-2.0
"""Which errors are out-of-memory errors, and how much they asked for."""

import pytest
import torch

from lightning_zero3.metrics.out_of_memory import bytes_asked, out_of_memory_in

# Word for word as the CUDA allocator of torch 2.13 says it (c10/cuda/CUDACachingAllocator.cpp).
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. "
    "GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free. "
    "Process 7 has 77.90 GiB memory in use."
)


def cpu_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48, dtype=torch.uint8)
    return caught.value


def test_sizes_are_read_from_the_allocators_words() -> None:
    assert bytes_asked(torch.OutOfMemoryError(CUDA)) == 2.5 * 2**30
    assert bytes_asked(cpu_error()) == 2**48
    assert bytes_asked(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")) is None


def test_only_out_of_memory_errors_are_explained() -> None:
    error = cpu_error()
    assert out_of_memory_in(error) is error
    wrapped = ValueError("in a layer")
    wrapped.__cause__ = error
    assert out_of_memory_in(wrapped) is error
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("no"), KeyboardInterrupt()):
        assert out_of_memory_in(other) is None
