# SPDX-License-Identifier: Apache-2.0
"""What the installed DeepSpeed, Lightning and Transformers can't do, alone or together, found by probing.

Each :class:`UpstreamLimit` is one such thing: where, why, what follows from it here and what ends it.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from lightning_zero3.capabilities.probing import UpstreamLimit, referenced_names


def output_recorders_break() -> bool:
    """Whether DeepSpeed's AutoEP can't move a Transformers output recorder to the layer that it puts in.

    It is tried on a model of three modules. DeepSpeed 0.19.8 uses the registry of recorders as a dict of strings, with
    a default; from Transformers 5.23 on it is keyed by the model.
    """
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return False  # a Transformers that records in another way
    from deepspeed.module_inject import auto_ep
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset, get_preset_adapter
    from torch import nn

    # The adapter goes by the class's name, or by the config's model type.
    model: Any = type("MixtralStandIn", (nn.Module,), {"_can_record_outputs": {"router_logits": None}})()
    model.mlp = nn.Module()
    model.mlp.router = nn.Module()
    model.mlp.router.gate = nn.Linear(1, 1)
    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    try:
        get_preset_adapter(get_preset("mixtral").preset_adapter).retarget_transformers_output_recorders(
            model,
            SimpleNamespace(model_family="mixtral"),
            model.mlp,
            set(),
            auto_ep._remove_transformers_output_capture_hooks,
        )
    except (TypeError, AttributeError, KeyError):
        return True
    finally:
        if isinstance(registry, dict):
            registry.pop(str(type(model)), None)
    return not model.mlp.router.gate._forward_hooks


def needs_output_recorders(preset: str) -> bool:
    """Whether an AutoEP preset moves Transformers' output recorders to the layers that it puts in.

    Args:
        preset: Name of a preset of the installed DeepSpeed.
    """
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPPresetAdapter
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset, get_preset_adapter

    adapter = type(get_preset_adapter(get_preset(preset).preset_adapter))
    unmoved = AutoEPPresetAdapter.retarget_transformers_output_recorders
    return bool(adapter.retarget_transformers_output_recorders is not unmoved)


def lacks_partitioned_initialisation() -> bool:
    """Whether Transformers has no way to initialise weights that are partitioned already."""
    try:
        from transformers.integrations.deepspeed import initialize_weights_zero3  # noqa: F401
    except ImportError:
        return True
    return False


def lightning_refuses_cpu() -> bool:
    """Whether Lightning's own strategy refuses anything but CUDA."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return "CUDAAccelerator" in referenced_names(DeepSpeedStrategy.setup_environment)


def gathers_wait_for_the_last_only() -> bool:
    """Whether DeepSpeed waits for the last of several gathers only, which is enough where they finish in order."""
    from deepspeed.runtime.zero import partition_parameters

    return "launch_handles[-1].wait()" in inspect.getsource(partition_parameters)


def reads_timers_in_every_step() -> bool:
    """Whether an engine with ``wall_clock_breakdown`` reads its timers in each step, by the methods that we know."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime import engine as module

    return (
        hasattr(module, "SynchronizedWallClockTimer")
        and {"_update_wall_clock_timers", "print_forward_breakdown"} <= referenced_names(DeepSpeedEngine.step)
        and "engine_timers_cache" in referenced_names(DeepSpeedEngine.get_wall_clock_timers)
        and "SynchronizedWallClockTimer" in referenced_names(DeepSpeedEngine.__init__)
    )


TIMERS_IN_EVERY_STEP = UpstreamLimit(
    name="timers in every step",
    symbol="DeepSpeedEngine._update_wall_clock_timers",
    reason="reads its timers, and so waits for the device, in every micro-step, whoever looks",
    affected="DeepSpeed 0.19.8 and earlier",
    present=reads_timers_in_every_step,
    consequence="with Zero3Monitor the timers run in logged steps only, and are read at the end of these; where the "
    "methods aren't those that we know, they run in every step",
    expires="an engine can be told which steps to time",
    mended_here=True,
)
OUTPUT_RECORDERS = UpstreamLimit(
    name="output recorders",
    symbol="transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
    reason="is keyed by the model, while DeepSpeed's AutoEP adapters use it as a dict of strings",
    affected="Transformers 5.23 and later with DeepSpeed 0.19.8 and earlier",
    present=output_recorders_break,
    consequence="for presets that move recorders (mixtral, qwen3_moe, qwen3_5_moe, minimax_m3) the registry takes both "
    "keys while the engine is built",
    expires="DeepSpeed passes the model",
    mended_here=True,
)
PARTITIONED_INITIALISATION = UpstreamLimit(
    name="partitioned initialisation",
    symbol="transformers.integrations.deepspeed.initialize_weights_zero3",
    reason="is missing, so weights that are partitioned already can't be initialised",
    affected="Transformers before 5.2x",
    present=lacks_partitioned_initialisation,
    consequence="build_from_config in configure_model is refused; models are built in __init__",
    expires="the oldest supported Transformers has it",
)
LIGHTNING_ON_CPU = UpstreamLimit(
    name="Lightning on a CPU",
    symbol="lightning.pytorch.strategies.DeepSpeedStrategy.setup_environment",
    reason="refuses every accelerator but CUDA",
    affected="Lightning 2.6.6 and earlier",
    present=lightning_refuses_cpu,
    consequence="our strategy sets the environment up itself",
    expires="Lightning allows CPUs",
    mended_here=True,
)
GATHERS_ON_GLOO = UpstreamLimit(
    name="gathers on gloo",
    symbol="deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param",
    reason="gathers several parameters and waits for the last of them only, so on a CPU weights may not be there yet",
    affected="DeepSpeed 0.19.7 and earlier",
    present=gathers_wait_for_the_last_only,
    consequence="on a CPU train in one process, or use DeepSpeed 0.19.8; NCCL isn't affected",
    expires="DeepSpeed >= 0.19.8 is the oldest that is supported",
)

UPSTREAM_LIMITS = (
    TIMERS_IN_EVERY_STEP,
    OUTPUT_RECORDERS,
    PARTITIONED_INITIALISATION,
    LIGHTNING_ON_CPU,
    GATHERS_ON_GLOO,
)
