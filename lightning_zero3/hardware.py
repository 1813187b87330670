# SPDX-License-Identifier: Apache-2.0
"""What accelerators can do at most, for those that are known by name."""

from __future__ import annotations

from lightning_zero3.gpus import GPUS

# Dense FLOP/s in bf16 and fp16, with accumulation in fp32, from the vendors' data sheets; where those give the figure
# with sparsity, half of it; of GPUS where that has them. By the name that torch.cuda.get_device_name gives. An A10G
# isn't here: its figures differ.
_TERA = 10**12
_PEAKS: dict[str, float] = {
    # NVIDIA A100 datasheet: 312 for all forms.
    "NVIDIA A100-SXM4-40GB": 312 * _TERA,
    "NVIDIA A100-SXM4-80GB": 312 * _TERA,
    "NVIDIA A100-PCIE-40GB": 312 * _TERA,
    "NVIDIA A100 80GB PCIe": 312 * _TERA,
    # NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2, and datasheets.
    "NVIDIA H100 80GB HBM3": GPUS["H100"].bf16_flops,
    "NVIDIA H100 PCIe": 756 * _TERA,
    "NVIDIA H100 NVL": 835 * _TERA,
    "NVIDIA H200": GPUS["H200"].bf16_flops,
    "NVIDIA GH200 480GB": 989.4 * _TERA,
    "NVIDIA B200": GPUS["B200"].bf16_flops,
    "NVIDIA L4": 121 * _TERA,
    "NVIDIA L40S": 362 * _TERA,
    "NVIDIA A40": 149.7 * _TERA,
    "NVIDIA GeForce RTX 3090": 71 * _TERA,
    "NVIDIA GeForce RTX 4090": 165.2 * _TERA,
    "AMD Instinct MI300X": GPUS["MI300X"].bf16_flops,
}
# The same in fp16 only: they have no bf16 units.
_FP16_ONLY: dict[str, float] = {
    "Tesla V100-SXM2-16GB": 125 * _TERA,
    "Tesla V100-SXM2-32GB": 125 * _TERA,
    "Tesla T4": 65 * _TERA,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The peak of one device, for matrix products in a run's precision.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` gives it.
        precision: As ``Trainer(precision=...)``: what starts with ``bf16`` or ``16``.

    Returns:
        FLOP/s; None for a device or a precision that isn't known. In fp32 it hangs on whether TF32 is allowed, for
        which products, so nothing is said.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16-mixed") / 1e12
    312.0
    >>> peak_flops("NVIDIA A100-SXM4-80GB", "32-true") is peak_flops("A GPU of tomorrow", "bf16-true") is None
    True
    """
    if precision in ("bf16-mixed", "bf16-true"):
        return _PEAKS.get(device_name)
    if precision in ("16-mixed", "16-true"):
        return {**_PEAKS, **_FP16_ONLY}.get(device_name)
    return None
