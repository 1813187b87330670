# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of times on a given GPU: what must be moved and computed, at the vendor's peak rates.

No run reaches them: kernels reach 60 to 80 % of peak operations, links less, and nothing here waits or launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_zero3.gpus import Gpu
from lightning_zero3.plan.flops import Flops
from lightning_zero3.plan.structure import ELEMENT_BYTES, Structure
from lightning_zero3.plan.traffic import Traffic

Update = Literal["adam", "sgd", "sgd with momentum"]
_MOMENTS: dict[Update, int] = {"adam": 2, "sgd": 0, "sgd with momentum": 1}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Seconds of one optimizer step on one rank.

    Args:
        optimizer: The optimizer step: bytes through the GPU's memory, or its host's.
        compute: Forward and backward: operations.
        node_links: Messages to GPUs of the same node.
        network: Messages to other nodes.
        host_link: What is offloaded, on its way.
        without_overlap: All one after the other.
        with_overlap: Messages hidden behind forward and backward as far as they go, and behind each other; the
            optimizer step comes after both.
    """

    optimizer: float
    compute: float
    node_links: float
    network: float
    host_link: float = 0.0

    @property
    def without_overlap(self) -> float:
        """Everything one after the other."""
        return self.optimizer + self.compute + self.node_links + self.network + self.host_link

    @property
    def with_overlap(self) -> float:
        """The longest of computing, the node's links, the network and the host's link, then the optimizer step."""
        return self.optimizer + max(self.compute, self.node_links, self.network, self.host_link)


def optimizer_bytes_per_element(structure: Structure, update: Update = "adam") -> int:
    """Bytes through the GPU's memory for each element that the optimizer updates.

    The gradient is read twice (for the norm, and for the update); masters and moments are read and written; weights
    are written where they aren't the masters.

    Args:
        structure: For its dtypes.
        update: The optimizer's rule.

    Raises:
        KeyError: An unknown rule.
    """
    dtypes = structure.dtypes
    gradient, master = ELEMENT_BYTES[dtypes.gradients], ELEMENT_BYTES[dtypes.masters]
    state, weight = ELEMENT_BYTES[dtypes.states], ELEMENT_BYTES[dtypes.weights]
    moments = 2 * state * _MOMENTS[update]
    return 2 * gradient + 2 * master + moments + (0 if structure.aliased else weight)


def optimizer_step_seconds(structure: Structure, gpu: Gpu, update: Update = "adam", *, on_host: bool = False) -> float:
    """The least time of the optimizer step.

    Args:
        structure: What the rank holds.
        gpu: The GPU.
        update: The optimizer's rule.
        on_host: Whether the host does it, in its own memory.
    """
    rate = gpu.host_memory_bytes_per_second if on_host else gpu.hbm_bytes_per_second
    return structure.elements_per_rank * optimizer_bytes_per_element(structure, update) / rate


def bounds_of(
    structure: Structure,
    flops: Flops,
    traffic: Iterable[Traffic],
    gpu: Gpu,
    *,
    recompute: bool = True,
    micro_steps: int = 1,
    devices: int = 8,
    update: Update = "adam",
    host_bytes: float = 0.0,
    on_host: bool = False,
) -> Bounds:
    """Lower bounds of one optimizer step.

    Args:
        structure: What the rank holds.
        flops: Of one forward.
        traffic: Of one optimizer step.
        gpu: The GPU.
        recompute: Whether layers are computed again in backward.
        micro_steps: Micro-steps of one optimizer step.
        devices: Ranks of each node.
        update: The optimizer's rule.
        host_bytes: Between the GPU and its host, in one direction.
        on_host: Whether the host does the optimizer step.
    """
    inside, outside = 0.0, 0.0
    for message in traffic:
        near, far = _split(message, devices)
        inside += near
        outside += far
    return Bounds(
        optimizer=optimizer_step_seconds(structure, gpu, update, on_host=on_host),
        compute=flops.training(recompute) * micro_steps / _flops_per_second(structure, gpu),
        node_links=inside / gpu.node_bytes_per_second,
        network=outside / gpu.network_bytes_per_second,
        host_link=host_bytes / gpu.host_bytes_per_second,
    )


def _flops_per_second(structure: Structure, gpu: Gpu) -> float:
    """Of fp32 at most as TF32, which is half of bf16 on each of these GPUs."""
    return gpu.bf16_flops / (2 if structure.dtypes.weights == "fp32" else 1)


def _split(message: Traffic, devices: int) -> tuple[float, float]:
    """Bytes that a rank sends within its node, and to other nodes, at least."""
    ranks = message.group_size
    members = min(ranks, max(1, devices // message.stride))
    if ranks <= members:
        return message.sent_bytes, 0.0
    if message.kind == "all-to-all":
        # What goes to ranks of other nodes goes over the network.
        far = message.buffer_bytes * (ranks - members) / ranks
        return message.sent_bytes - far, far
    # The node's ranks together need what the others hold once, and can share it out among themselves.
    nodes = ranks / members
    far = message.sent_bytes / (ranks - 1) * ranks * (1 - 1 / nodes) / members
    return message.sent_bytes - far, far
