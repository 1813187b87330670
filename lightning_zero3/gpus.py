# SPDX-License-Identifier: Apache-2.0
"""Public figures of the GPUs that a plan is made for; each with the page that says so.

Bandwidths are in one direction: vendors add up both, so their figures are halved here and in each link's comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero3.config import SetupError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, in the node that it is usually sold in.

    Args:
        name: As people call it.
        memory_gib: What PyTorch reports as its total (``torch.cuda.get_device_properties(0).total_memory``); the
            data sheet's figure is larger, since it counts in powers of ten and the driver keeps some.
        hbm_bytes_per_second: Peak bandwidth of its memory.
        bf16_flops: Peak dense bf16 operations per second, without sparsity.
        node_bytes_per_second: What it can send to the other GPUs of its node, in one direction.
        network_bytes_per_second: What it can send to other nodes, in one direction; of the usual node, in which each
            GPU has a network card to itself.
        host_bytes_per_second: What it can send to its host, or get from it, in one direction.
        host_memory_bytes_per_second: Its part of what all memory channels of its host read and write at most.
        sources: What was read where.
    """

    name: str
    memory_gib: float
    hbm_bytes_per_second: float
    bf16_flops: float
    node_bytes_per_second: float
    network_bytes_per_second: float
    host_bytes_per_second: float
    host_memory_bytes_per_second: float
    sources: Mapping[str, str]


_HOPPER_LINKS = "NVLink 900 GB/s, both directions: https://www.nvidia.com/en-us/data-center/nvlink/"
_HOST_OF_HOPPER = (
    "2 Xeon 8480C with 8 channels of DDR5-4800 for 8 GPUs: "
    "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
)
_CARD_OF_ITS_OWN = "8 × 400 Gb/s for 8 GPUs: "

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="H100",
            memory_gib=79.1,
            hbm_bytes_per_second=3.35e12,
            bf16_flops=989.4e12,
            node_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            host_bytes_per_second=64e9,
            host_memory_bytes_per_second=76.8e9,
            sources={
                "memory_gib": "80 GB: https://www.nvidia.com/en-us/data-center/h100/ (SXM); PyTorch reports 79.11 GiB: "
                "https://github.com/vllm-project/vllm/issues/27508",
                "hbm_bytes_per_second": "3.35 TB/s: https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
                "bf16_flops": "989.4 dense: https://resources.nvidia.com/en-us-tensor-core (H100 architecture white "
                "paper, SXM5); the data sheet's 1,979 is with sparsity",
                "node_bytes_per_second": _HOPPER_LINKS,
                "network_bytes_per_second": _CARD_OF_ITS_OWN
                + "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
                "host_bytes_per_second": "PCIe Gen5, 128 GB/s, both directions: "
                "https://www.nvidia.com/en-us/data-center/h100/",
                "host_memory_bytes_per_second": _HOST_OF_HOPPER,
            },
        ),
        Gpu(
            name="H200",
            memory_gib=139.8,
            hbm_bytes_per_second=4.8e12,
            bf16_flops=989.4e12,
            node_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            host_bytes_per_second=64e9,
            host_memory_bytes_per_second=76.8e9,
            sources={
                "memory_gib": "141 GB: https://www.nvidia.com/en-us/data-center/h200/; as PyTorch reports it",
                "hbm_bytes_per_second": "4.8 TB/s: https://www.nvidia.com/en-us/data-center/h200/",
                "bf16_flops": "1,979 with sparsity, so half: https://www.nvidia.com/en-us/data-center/h200/; the "
                "H100's die",
                "node_bytes_per_second": _HOPPER_LINKS,
                "network_bytes_per_second": _CARD_OF_ITS_OWN
                + "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
                "host_bytes_per_second": "PCIe Gen5, 128 GB/s, both directions: "
                "https://www.nvidia.com/en-us/data-center/h200/",
                "host_memory_bytes_per_second": _HOST_OF_HOPPER,
            },
        ),
        Gpu(
            name="B200",
            memory_gib=178.3,
            hbm_bytes_per_second=8.0e12,
            bf16_flops=2250e12,
            node_bytes_per_second=900e9,
            network_bytes_per_second=50e9,
            host_bytes_per_second=128e9,
            host_memory_bytes_per_second=89.6e9,
            sources={
                "memory_gib": "1,440 GB for 8: https://www.nvidia.com/en-us/data-center/dgx-b200/; CUDA reports 178.35 "
                "GiB: https://github.com/pytorch/ao/pull/4002",
                "hbm_bytes_per_second": "64 TB/s for 8: https://www.nvidia.com/en-us/data-center/dgx-b200/; its bus "
                "and clock give 7.67 each: https://github.com/pytorch/ao/pull/4002",
                "bf16_flops": "36 PFLOPS with sparsity for 8, so 2.25 dense: "
                "https://www.nvidia.com/en-us/data-center/hgx/",
                "node_bytes_per_second": "NVLink 5, 1.8 TB/s, both directions: "
                "https://www.nvidia.com/en-us/data-center/nvlink/",
                "network_bytes_per_second": _CARD_OF_ITS_OWN
                + "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
                "host_bytes_per_second": "PCIe Gen6 at most, 256 GB/s, both directions: "
                "https://glennklockwood.com/garden/processors/B200",
                "host_memory_bytes_per_second": "2 Xeon 8570 with 8 channels of DDR5-5600 for 8 GPUs: "
                "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
            },
        ),
        Gpu(
            name="MI300X",
            memory_gib=191.5,
            hbm_bytes_per_second=5.3e12,
            bf16_flops=1307.4e12,
            node_bytes_per_second=448e9,
            network_bytes_per_second=50e9,
            host_bytes_per_second=64e9,
            host_memory_bytes_per_second=115.2e9,
            sources={
                "memory_gib": "192 GB of HBM, which are GiB: "
                "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html; as PyTorch reports it",
                "hbm_bytes_per_second": "5.3 TB/s: "
                "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
                "bf16_flops": "1,307.4 dense: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
                "node_bytes_per_second": "7 links of 128 GB/s, both directions, to the 7 others: "
                "https://www.amd.com/en/products/accelerators/instinct/mi300/platform.html",
                "network_bytes_per_second": "a 400 Gb/s card for each GPU: "
                "https://rocm.docs.amd.com/en/latest/how-to/gpu-cluster-networking.html",
                "host_bytes_per_second": "PCIe 5.0 × 16, 128 GB/s, both directions: "
                "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
                "host_memory_bytes_per_second": "2 EPYC 9004 with 12 channels of DDR5-4800 for 8 GPUs: "
                "https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series.html",
            },
        ),
    )
}


def gpu(name: str) -> Gpu:
    """One of :data:`GPUS`.

    Args:
        name: In any case.

    Raises:
        SetupError: There is none of that name.

    >>> gpu("h200").bf16_flops
    989400000000000.0
    """
    for each in GPUS.values():
        if each.name.lower() == name.lower():
            return each
    raise SetupError(f"--gpu {name!r}: one of {', '.join(GPUS)}.")
