# SPDX-License-Identifier: Apache-2.0
"""Which runs keep upstream's step: those whose step does more than our parts know of."""

from __future__ import annotations

from typing import Any

# Attribute of upstream's optimizer → what it means when it is set. Each makes the step move, transform or skip
# tensors between the calls that we replace.
_OTHER_PATHS = {
    "offload_optimizer": "the optimizer is offloaded",
    "swap_optimizer": "the optimizer's states are on NVMe",
    "offload_param": "parameters are offloaded",
    "params_in_nvme_and_cpu": "parameters are on NVMe",
    "zenflow": "ZenFlow updates on its own schedule",
    "use_muon": "Muon orthogonalizes gradients within the step",
    "torch_autocast_gradscaler": "a GradScaler steps and updates once per sub-group",
    "zero_quantized_nontrainable_weights": "frozen weights are quantized",
}


def reason_for_upstreams_step(optimizer: Any) -> str | None:
    """Why this optimizer's step is left to upstream, or None where our parts cover it.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer_Stage3``.

    Returns:
        Words for a message. Upstream symbols: the attributes above (0.19.7, 0.19.8); one that a release lacks counts
        as unset.
    """
    for name, reason in _OTHER_PATHS.items():
        if getattr(optimizer, name, None):
            return reason
    # Secondary partitions are released, gathered and invalidated along with the first.
    return "weights have secondary partitions (hpZ)" if has_secondary_partitions(optimizer) else None


def has_secondary_partitions(optimizer: Any) -> bool:
    """Whether weights have hpZ's secondary partitions.

    Not told by the config: DeepSpeed keeps the process group of hpZ for the whole process, and every later engine in it
    has secondary partitions as well.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer_Stage3``.
    """
    return getattr(optimizer.fp16_groups[0][0], "ds_zero_param_process_group", None) is not None
