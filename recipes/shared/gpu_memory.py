# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits its GPUs, by a plan of it, before anything is started."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_zero3.config import SetupError
from lightning_zero3.plan.child import rehearse_run
from lightning_zero3.plan.depth import scene_of
from lightning_zero3.plan.memory import Memory, memory_of
from lightning_zero3.plan.settings import Setup, said_by
from shared.settings import Settings

_GIB = 2**30


def check_gpu_memory(settings: Settings, config: Any, *, ranks: int, expert_parallel_size: int) -> None:
    """Plan the run's first steps on rank 0, and refuse it where this machine's GPU is smaller than they need.

    Nothing is done without a GPU, for the scaled-down size, or with ``--check_memory false``.

    Args:
        settings: The run's.
        config: The model's.
        ranks: The number of ranks.
        expert_parallel_size: The run's.

    Raises:
        SetupError: It doesn't fit; the message has the parts of the memory, and what to change.
    """
    wanted = settings.check_memory and settings.size == "full" and torch.cuda.is_available()
    if not wanted or getattr(rank_zero_only, "rank", 0) != 0:
        return
    memory = planned_memory(settings, config, ranks=ranks, expert_parallel_size=expert_parallel_size)
    refuse_what_does_not_fit(memory, torch.cuda.get_device_properties(0).total_memory)


def planned_memory(settings: Settings, config: Any, *, ranks: int, expert_parallel_size: int) -> Memory:
    """What a rank of a run will need.

    Args:
        settings: The run's.
        config: The model's.
        ranks: The number of ranks.
        expert_parallel_size: The run's.

    Raises:
        SetupError: The run can't be set up.
    """
    with tempfile.TemporaryDirectory() as folder:
        setup = setup_of(settings, config, folder, ranks=ranks, expert_parallel_size=expert_parallel_size)
        structure, (rehearsal,) = rehearse_run(setup, (scene_of(setup),))
    return memory_of(setup, structure, rehearsal)


def setup_of(settings: Settings, config: Any, folder: str, *, ranks: int, expert_parallel_size: int) -> Setup:
    """A run as the plan takes it.

    Args:
        settings: The run's.
        config: The model's; it is saved in ``folder``.
        folder: An empty one, which has to live until the plan is made.
        ranks: The number of ranks.
        expert_parallel_size: The run's.
    """
    config.save_pretrained(folder)
    return Setup(
        model=folder,
        nodes=settings.num_nodes,
        devices=ranks // settings.num_nodes,
        **{**said_by(settings), "expert_parallel_size": expert_parallel_size},
    )


def refuse_what_does_not_fit(memory: Memory, capacity: int) -> None:
    """Hold a plan against a GPU.

    Args:
        memory: A rank's.
        capacity: The GPU's memory, in bytes.

    Raises:
        SetupError: It doesn't fit.
    """
    if memory.total <= capacity:
        return
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{name.replace('_', ' ')} {size / _GIB:.1f}" for name, size in parts if size >= 0.05 * _GIB)
    raise SetupError(
        f"By plan, this run needs {memory.total / _GIB:.1f} GiB of each GPU, and this machine's have "
        f"{capacity / _GIB:.1f}: {memory.between_steps / _GIB:.1f} GiB between steps ({held}), up to "
        f"{(memory.peak - memory.between_steps) / _GIB:.1f} more within one, {memory.allowance / _GIB:.1f} allowed for "
        "what isn't a tensor. Use more nodes, a shorter --sequence_length, --recompute_activations true, more "
        "--loss_tiles, or --bf16_masters true (`lightning-zero3 plan --sweep` compares); or try it all the same with "
        "--check_memory false."
    )
