# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a device are weights, masters, gradients, states and buckets: from the engine's own tensors.

Upstream symbols, read: ``fp16_groups``, ``fp16_partitioned_groups_flat``, ``lp_param_buffer``,
``fp32_partitioned_groups_flat``, ``grad_partitions_flat_buffer``, ``averaged_gradients``, ``ipg_buckets`` of the
Stage-3 optimizer, ``ds_tensor`` of parameters (0.19.7, 0.19.8). What isn't there counts as part of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_zero3.metrics.memory import resident_bytes

WEIGHTS = "weights"
GATHERED = "gathered weights"
MASTERS = "masters"
STATES = "optimizer states"
BUCKETS = "buckets"
GRADIENTS = "gradients"
REST = "rest"


def memory_by_part(engine: Any, optimizers: Iterable[Any], device: torch.device) -> dict[str, int]:
    """Bytes that each part holds on a device; storage that two parts share counts for the first of them.

    Args:
        engine: A DeepSpeed engine, or any other module.
        optimizers: The Trainer's.
        device: Where the memory is. On CUDA the rest is what else the allocator has given out, on a CPU what else of
            the process is resident: activations, and on a CPU the program itself. There the rest is too small by what
            of a part was never written to, such as an empty bucket.

    Returns:
        Part → bytes, in order; parts that the engine doesn't have are 0.
    """
    optimizer = getattr(engine, "optimizer", None)
    seen: set[int] = set()
    parts = {}
    for name, tensors in (
        (WEIGHTS, _weights(engine, optimizer)),
        (GATHERED, _gathered(engine)),
        (MASTERS, _masters(optimizer)),
        (STATES, _states(optimizer, optimizers)),
        (BUCKETS, _buckets(optimizer)),
        (GRADIENTS, _gradients(engine, optimizer)),
    ):
        parts[name] = _bytes_of(tensors, device, seen)
    total = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    parts[REST] = max(0, total - sum(parts.values()))
    return parts


def masters_are_weights(engine: Any) -> bool:
    """Whether any master copy shares a weight's storage.

    Args:
        engine: A DeepSpeed engine, or any other module.
    """
    optimizer = getattr(engine, "optimizer", None)
    weights = {_address(tensor) for tensor in _weights(engine, optimizer)}
    return any(_address(master) in weights for master in _masters(optimizer))


def _weights(engine: Any, optimizer: Any) -> Iterator[Any]:
    for parameter in _parameters(engine):
        # Stage 3: a rank's partition, while the parameter itself is empty or gathered.
        yield getattr(parameter, "ds_tensor", parameter)
    yield from getattr(optimizer, "fp16_partitioned_groups_flat", ())
    yield getattr(optimizer, "lp_param_buffer", None)


def _gathered(engine: Any) -> Iterator[Any]:
    return (parameter.data for parameter in _parameters(engine) if hasattr(parameter, "ds_tensor"))


def _masters(optimizer: Any) -> Iterator[Any]:
    yield from getattr(optimizer, "fp32_partitioned_groups_flat", ())


def _states(optimizer: Any, optimizers: Iterable[Any]) -> Iterator[Any]:
    for each in (getattr(optimizer, "optimizer", None), *optimizers):
        state = getattr(each, "state", None)
        for values in state.values() if isinstance(state, dict) else ():
            yield from values.values() if isinstance(values, dict) else ()


def _buckets(optimizer: Any) -> Iterator[Any]:
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield getattr(bucket, "buffer", None)


def _gradients(engine: Any, optimizer: Any) -> Iterator[Any]:
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    for gradients in getattr(optimizer, "averaged_gradients", {}).values():
        yield from gradients or ()
    for tensor in (*_parameters(engine), *_masters(optimizer)):
        yield tensor.grad


def _parameters(engine: Any) -> list[Any]:
    return list(engine.parameters()) if isinstance(engine, nn.Module) else []


def _bytes_of(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type and _address(tensor) not in seen:
            seen.add(_address(tensor))
            total += tensor.untyped_storage().nbytes()
    return total


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0
