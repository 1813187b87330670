# SPDX-License-Identifier: Apache-2.0
"""The only caller of ``deepspeed.initialize``, and the only reader of the engine's internals."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3 import engine_end
from lightning_zero3.capabilities.fixes import parts_to_leave_out
from lightning_zero3.capabilities.limits import TIMERS_IN_EVERY_STEP
from lightning_zero3.ds_config import inference_config
from lightning_zero3.flops import flops_or_reason
from lightning_zero3.metrics import engine_timers
from lightning_zero3.moe import tensor_parallel
from lightning_zero3.moe.expert_parallel import (
    ExpertParallelTarget,
    NoMoELayerError,
    already_replaced,
    auto_ep_on,
    keep_eager,
)
from lightning_zero3.moe.leaf_modules import mark_leaf_modules, warn_of_unmarked, watch_leaf_calls
from lightning_zero3.moe.tensor_parallel import TensorParallelTarget
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def build_training_engine(
    module: nn.Module,
    *,
    config: Mapping[str, Any],
    optimizer: Any,
    lr_scheduler: Any,
    local_rank: int,
    switches: Switches,
    target: ExpertParallelTarget | None,
    split: TensorParallelTarget | None = None,
    print_timers: bool = True,
    leaf_modules: bool = True,
) -> tuple[DeepSpeedEngine, Any]:
    """Run ``deepspeed.initialize`` so that it builds our optimizer and, if asked, AutoEP's layers.

    Upstream symbol: ``deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3``, imported by name inside
    ``DeepSpeedEngine._configure_zero_optimizer`` (0.19.7, 0.19.8). Reason: the engine has no argument for the
    optimizer's class. Detected by looking at what was built. Expires when it has one.

    Args:
        module: The module to train, usually a LightningModule.
        config: The completed DeepSpeed config.
        optimizer: The user's optimizer, or None where the config names one.
        lr_scheduler: The user's scheduler, or None.
        local_rank: This process's device index (any index does for a CPU).
        switches: The optimizer's switches.
        target: The model for AutoEP, or None.
        split: The model for AutoTP, or None.
        print_timers: Whether DeepSpeed times every step and prints it, where the config has timers on. Else they run
            when they are asked to (:mod:`lightning_zero3.metrics.engine_timers`), and print nothing.
        leaf_modules: Whether experts in lists are made leaf modules.

    Returns:
        The engine and the optimizer that it built.

    Raises:
        NoMoELayerError: A target was given and no layer of it was replaced.
        LeafModuleError: Experts in a list can't be gathered as one, or the config names a leaf that isn't there.
        NoShardedLayerError: A model to split was given and no layer of it was split.
    """
    import deepspeed
    from deepspeed.runtime.zero import stage3

    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

    _see_to_experts_in_lists(module, config, leaf_modules)
    model_flops = flops_or_reason(module)  # before AutoEP and AutoTP put other layers in
    with ExitStack() as scope:
        if _something_rebinds_masters(config):
            switches = replace(switches, alias_master_weights=False)
        ours = FastStage3Optimizer.with_switches(_switches_that_apply(switches, stage3.DeepSpeedZeroOptimizer_Stage3))
        scope.enter_context(substituted(stage3, "DeepSpeedZeroOptimizer_Stage3", ours))
        scope.enter_context(_setting_up(module, config, target, split))
        if not print_timers:
            scope.enter_context(substituted(deepspeed.utils.timer, "print_dist", lambda *_, **__: None))
        timers_wait = not print_timers and TIMERS_IN_EVERY_STEP.present()
        if timers_wait:
            scope.enter_context(
                substituted(deepspeed.runtime.engine, "SynchronizedWallClockTimer", engine_timers.on_demand_timers())
            )
        engine, built, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=local_rank),
            config=dict(config),
            model=module,
            # Lazy, as in Lightning: it is read after AutoEP has replaced parameters.
            model_parameters=filter(lambda parameter: parameter.requires_grad, module.parameters()),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    if not isinstance(built, FastStage3Optimizer):
        rank_zero_warn(
            f"DeepSpeed built its own {type(built).__name__} instead of FastStage3Optimizer, so the switches of "
            "zero3_fast have no effect in this run: this configuration, or this DeepSpeed, has another Stage-3 path."
        )
    _settle(engine, target, split)
    if leaf_modules:
        watch_leaf_calls(module)
    engine_end.remember(module, engine_end.BuiltEngine(engine, inference_config(config), target, split))
    if timers_wait:
        engine_timers.read_at_steps_end(engine)
    elif not print_timers:
        _silence_timer_lines(engine)
    engine.model_flops = model_flops
    return engine, built


@contextmanager
def _setting_up(
    module: nn.Module,
    config: Mapping[str, Any],
    target: ExpertParallelTarget | None,
    split: TensorParallelTarget | None,
) -> Iterator[None]:
    """What every engine needs around ``deepspeed.initialize``: nothing of an earlier one, and its own layers."""
    from deepspeed.runtime.zero import partition_parameters

    before = engine_end.engine_of(module)
    if before is not None:
        engine_end.end(before.engine)
    engine_end.remove_engine_hooks(module)
    _cast_partitions(module, config)
    engine_end.forget_what_engines_leave(config)
    init = partition_parameters.InsertPostInitMethodToModuleSubClasses
    with ExitStack() as scope:
        scope.enter_context(substituted(init, "_set_dtype", _given_dtype_first(init._set_dtype)))
        if target is not None:
            scope.enter_context(auto_ep_on(target))
        tensor_parallel.forget_other_layouts(config["tensor_parallel"]["autotp_size"] if split is not None else 1)
        if split is not None:
            if not tensor_parallel.already_split(module):
                tensor_parallel.start_alike(module)
            scope.enter_context(tensor_parallel.auto_tp_on(split))
        yield


@torch.no_grad()
def _cast_partitions(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Give weights that an earlier engine has partitioned this run's dtype; DeepSpeed casts whole weights only."""
    if engine_end.engine_of(module) is None:
        return
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    wanted = next((dtype for name, dtype in dtypes.items() if config.get(name, {}).get("enabled")), torch.float32)
    for parameter in module.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None and partition.is_floating_point() and partition.dtype != wanted:
            partition.data = partition.data.to(wanted)
            parameter.data = parameter.data.to(wanted)


def _settle(engine: Any, target: ExpertParallelTarget | None, split: TensorParallelTarget | None) -> None:
    module = engine.module
    engine_end.free_with_its_module(engine)
    if target is not None:
        if not already_replaced(module):
            raise NoMoELayerError(f"AutoEP replaced no layer of {target.path or type(module).__name__}.")
        keep_eager(module)
    if split is not None:
        if not tensor_parallel.sharded_layers(module):
            raise tensor_parallel.NoShardedLayerError(
                f"AutoTP split no layer of {split.path or type(module).__name__}."
            )
        _settle_tensor_parallel(engine)


def _given_dtype_first(upstream: Callable[..., None]) -> Callable[..., None]:
    """``zero.Init``'s choice of a dtype, less its slip: without fp16, as on a CPU, it passes over the one it is given.

    Weights that are swapped to files are stored in that dtype, so those of a whole fp32 model were rounded to bf16.
    """

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        if dtype is None:
            upstream(self, ds_config, dtype)
        else:
            self.dtype = dtype

    return set_dtype


def _see_to_experts_in_lists(module: nn.Module, config: Mapping[str, Any], leaf_modules: bool) -> None:
    # One rank can't disagree with itself.
    if torch.distributed.get_world_size() > 1:
        if leaf_modules:
            mark_leaf_modules(module, config)
        else:
            warn_of_unmarked(module)


def _something_rebinds_masters(config: Mapping[str, Any]) -> bool:
    """Whether DeepCompile moves masters around in each step, and leaves weights that share their storage behind."""
    return bool(config.get("compile", {}).get("offload_opt_states", False))


def _switches_that_apply(switches: Switches, upstream: type[Any]) -> Switches:
    """Switch off what upstream does itself, silently, and what it has no place for, with a warning."""
    left_out = parts_to_leave_out(upstream)
    lacking = {name: why for name, why in left_out.items() if why is not None and getattr(switches, name)}
    if lacking:
        details = "; ".join(f"{name} needs {why}" for name, why in lacking.items())
        rank_zero_warn(
            f"This DeepSpeed's Stage-3 optimizer is laid out in a way that lightning_zero3 doesn't know, so parts of "
            f"zero3_fast are off and upstream's own code runs instead: {details}."
        )
    return replace(switches, **dict.fromkeys(left_out, False))


def build_inference_engine(
    module: nn.Module,
    *,
    config: Mapping[str, Any],
    local_rank: int,
    target: ExpertParallelTarget | None = None,
    split: TensorParallelTarget | None = None,
) -> DeepSpeedEngine:
    """Run ``deepspeed.initialize`` without an optimizer, for validate, test and predict.

    It holds partitioned weights, and neither masters nor moments nor gradients.

    Args:
        module: The module to evaluate.
        config: A config from :func:`lightning_zero3.ds_config.inference_config`.
        local_rank: This process's device index.
        target: The model for AutoEP, or None.
        split: The model for AutoTP, or None.
    """
    import deepspeed

    _see_to_experts_in_lists(module, config, leaf_modules=True)
    with _setting_up(module, config, target, split):
        engine, _, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=local_rank),
            config=dict(config),
            model=module,
            model_parameters=[],
            optimizer=None,
            lr_scheduler=None,
            dist_init_required=False,
        )
    _settle(engine, target, split)
    engine_end.remember(module, engine_end.BuiltEngine(engine, inference_config(config), target, split))
    return engine


def _settle_tensor_parallel(engine: Any) -> None:
    """Count tensor-parallel peers once, and leave the check of their data to us.

    Upstream symbols: ``DeepSpeedConfig.train_batch_size``, computed as if every rank had its own batch, and
    ``DeepSpeedEngine.first_dataloader_check``, which fails on dict and tuple batches ("Boolean value of Tensor with
    more than one value is ambiguous") (0.19.7, 0.19.8). Expires when upstream divides by the tensor parallel size and
    compares nested batches.

    Args:
        engine: An engine with AutoTP's layers.
    """
    config = engine._config
    config.train_batch_size = (
        config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * engine.dp_world_size
    )
    engine.tput_timer.batch_size = config.train_batch_size
    if getattr(engine, "first_dataloader_check", None) is not None:
        engine.first_dataloader_check.remove()


def _silence_timer_lines(engine: Any) -> None:
    """Keep DeepSpeed's step timers, drop the lines that they print.

    Upstream symbol: ``SynchronizedWallClockTimer.log`` (0.19.7, 0.19.8), which prints past any logging level and resets
    the timers. Replaced on this engine's timers only, so it ends with the engine; the reset stays. Expires when
    upstream can time without printing.

    Args:
        engine: A DeepSpeed engine with ``wall_clock_breakdown``.
    """
    timers = engine.timers

    def reset_only(names: Any, *_: Any, reset: bool = True, **__: Any) -> None:
        for name in names:
            if reset and name in timers.get_timers():
                timers(name).reset()

    if hasattr(timers, "get_timers"):
        timers.log = reset_only
