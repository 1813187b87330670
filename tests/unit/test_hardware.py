# SPDX-License-Identifier: Apache-2.0
"""Peaks of GPUs: known ones by name, none for others."""

import pytest

from lightning_zero3 import hardware
from lightning_zero3.hardware import peak_flops


@pytest.mark.parametrize("name", [*hardware._PEAKS, *hardware._FP16_ONLY])
def test_figures_are_dense_teraflops(name: str) -> None:
    peak = peak_flops(name, "16-mixed")
    assert peak is not None
    # A figure without its factor, or with sparsity, would be outside.
    assert 50e12 < peak < 2500e12


def test_a_device_without_bf16_units_has_no_peak_in_bf16() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16-true") is None
    assert peak_flops("NVIDIA H200", "bf16-true") == peak_flops("NVIDIA H200", "16-true") == 989.4e12


@pytest.mark.parametrize("name", ["", "NVIDIA H300", "NVIDIA A100", "nvidia h200"])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_nothing_is_guessed_from_a_part_of_a_name(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


@pytest.mark.parametrize("precision", ["32-true", "64-true", "transformer-engine", "bf16"])
def test_nothing_is_said_of_other_precisions(precision: str) -> None:
    assert peak_flops("NVIDIA H200", precision) is None
