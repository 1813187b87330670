# SPDX-License-Identifier: Apache-2.0
"""What a planned run computes and sends in a step, and how fast that could be at best, on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_zero3.gpus import GPUS
from lightning_zero3.plan.bounds import Bounds, bounds_of
from lightning_zero3.plan.flops import Flops, flops_of
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import Shape
from lightning_zero3.plan.structure import ELEMENT_BYTES, Structure
from lightning_zero3.plan.traffic import Traffic, traffic_of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one optimizer step of one micro-step.

    Args:
        tokens_per_step: Of all ranks together; tensor-parallel peers see the same ones.
        flops: Of one rank's forward.
        traffic: What one rank sends.
        host_bytes: Between one GPU and its host, in the direction that takes more; 0 without offload.
        bounds: Lower bounds of times by GPU.
    """

    tokens_per_step: int
    flops: Flops
    traffic: tuple[Traffic, ...]
    host_bytes: int
    bounds: Mapping[str, Bounds]

    @property
    def sent_bytes(self) -> float:
        """By one rank, of every kind."""
        return sum(message.sent_bytes for message in self.traffic)

    def seconds_per_million_tokens(self, gpu: str) -> float:
        """The least time in which all ranks together see a million tokens.

        Args:
            gpu: Name of a GPU.
        """
        return self.bounds[gpu].with_overlap / self.tokens_per_step * 1e6

    def to_json(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "bytes_sent_per_step": [
                {**asdict(message), "sent_bytes": round(message.sent_bytes)} for message in self.traffic
            ],
            "bytes_to_or_from_host_per_step": self.host_bytes,
            "flops_per_forward": asdict(self.flops),
            "lower_bounds_seconds": {
                name: {**asdict(b), "with_overlap": b.with_overlap, "without_overlap": b.without_overlap}
                for name, b in self.bounds.items()
            },
        }


def predict(setup: Setup, structure: Structure, shape: Shape) -> Prediction:
    """Arithmetic on a structure.

    Args:
        setup: The run.
        structure: Of its rank.
        shape: The model's sizes.
    """
    flops = flops_of(
        structure.parameters,
        shape,
        sequence_length=setup.sequence_length,
        samples=setup.micro_batch_size,
        tensor_parallel_size=setup.tensor_parallel_size,
    )
    traffic = traffic_of(
        structure,
        shape,
        tokens=setup.tokens_per_micro_step,
        world_size=setup.world_size,
        expert_parallel_size=setup.expert_parallel_size or 1,
        tensor_parallel_size=setup.tensor_parallel_size,
        recompute=setup.recompute_activations,
    )
    host_bytes = _host_bytes(setup, structure)
    return Prediction(
        tokens_per_step=setup.tokens_per_micro_step * setup.topology.data_parallel_size,
        flops=flops,
        traffic=traffic,
        host_bytes=host_bytes,
        bounds={
            name: bounds_of(
                structure,
                flops,
                traffic,
                gpu,
                recompute=setup.recompute_activations,
                devices=setup.devices,
                host_bytes=host_bytes,
                on_host=setup.offload_optimizer,
            )
            for name, gpu in GPUS.items()
        },
    )


def _host_bytes(setup: Setup, structure: Structure) -> int:
    """At least: gradients to the host, new weights from it; its own weights again for forward and for backward."""
    weight = ELEMENT_BYTES[structure.dtypes.weights]
    away, back = 0, 0
    if setup.offload_optimizer:
        away += structure.elements_per_rank * ELEMENT_BYTES[structure.dtypes.gradients]
        back += structure.elements_per_rank * weight
    if setup.offload_parameters:
        back = 2 * weight * sum(p.partition_elements for p in structure.parameters)
    return max(away, back)
