# SPDX-License-Identifier: Apache-2.0
"""The random states of one rank (Python's, NumPy's, torch's, the device's, DeepSpeed's) as a checkpoint can hold them.

Lightning saves none. Tensors, numbers and tuples only, so that an unpickler that allows nothing else reads them.

Upstream symbols: ``get_cuda_rng_tracker`` (DeepSpeed 0.19.7, 0.19.8), whose states are those of activation
checkpointing over model-parallel ranks. Read and set by its own methods.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TRACKER = "deepspeed.runtime.activation_checkpointing.checkpointing"


def collected(device: torch.device) -> dict[str, Any]:
    """The random states of this process.

    Args:
        device: Whose generator is this rank's; other devices' are other ranks'.
    """
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        # int64, since torch knows no arithmetic of uint32, and an array needs NumPy's own unpickler.
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), cached),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    tracker = _tracker()
    if tracker is not None and tracker.get_states():
        states["deepspeed"] = {key: state.clone() for key, state in tracker.get_states().items()}
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Set this process's random states.

    Args:
        states: From :func:`collected`, perhaps on another kind of device, whose generator's state is then left out.
        device: This rank's.
    """
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"].cpu(), device)
    tracker = _tracker()
    if tracker is not None and "deepspeed" in states:
        tracker.set_states(dict(states["deepspeed"]))


def differ(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a random number was drawn between two looks at the host's generators.

    Args:
        some: From :func:`collected`.
        others: From :func:`collected`.
    """
    return bool(
        some["python"] != others["python"]
        or some["numpy"][2:] != others["numpy"][2:]
        or not torch.equal(some["numpy"][1], others["numpy"][1])
        or not torch.equal(some["torch"], others["torch"])
    )


def _tracker() -> Any:
    # Only where somebody has imported it: seeds are in it by DeepSpeed's own call, never without.
    module = sys.modules.get(_TRACKER)
    return None if module is None else module.get_cuda_rng_tracker()
