# SPDX-License-Identifier: Apache-2.0
"""What this package works around in DeepSpeed's Stage-3 optimizer, found by probing, not by version numbers.

Each :class:`UpstreamFix` is one thing: where, why, how it is detected and what ends it. A part steps aside where
upstream has the fix, and where upstream no longer calls what the part hangs on.
"""

from __future__ import annotations

import inspect
from typing import Any

from lightning_zero3.capabilities.backward import GRADIENT_BUCKETS, LEAN_HOOKS, LEAN_LINEAR, coordinator
from lightning_zero3.capabilities.probing import UpstreamFix, not_mended, referenced_names, unwrapped


def clears_once_per_step(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class clears gradients in ``step`` and no longer per sub-group."""
    return "zero_grad" not in referenced_names(stage3._prepare_fp32_grad_for_sub_group)


def aliases_master_weights(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class compares devices in a way that can be true.

    The dead comparison is ``tensor.device == self.device`` with a string on the right. A mended one wraps the string
    in ``torch.device``, which then appears among the names next to ``device``.
    """
    source = inspect.getsource(unwrapped(stage3._create_fp32_partitions))
    return "torch.device(self.device)" in source


def skips_invalid_norms(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class takes a gradient norm that is no finite number for an overflow."""
    return "combine_grad_norm_groups" in referenced_names(stage3.step)


GRAD_CLEAR = UpstreamFix(
    name="scoped_grad_clear",
    symbol="DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group",
    reason="calls zero_grad, which visits every parameter, once per sub-group",
    affected="0.19.7 and earlier",
    mended=clears_once_per_step,
    hooks=(
        (("_prepare_sub_group",), "_prepare_fp32_grad_for_sub_group"),
        (("_prepare_fp32_grad_for_sub_group", "step"), "zero_grad"),
    ),
    expires="DeepSpeed >= 0.19.8 is the oldest that is supported",
)

MASTER_ALIAS = UpstreamFix(
    name="alias_master_weights",
    symbol="DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions",
    reason="compares a torch.device with a string, so the branch that shares weights and masters never runs",
    affected="0.19.8 and earlier",
    mended=aliases_master_weights,
    hooks=((("_setup_for_real_optimizer", "__init__"), "_create_fp32_partitions"),),
    expires="the oldest supported DeepSpeed compares devices and keeps offload and reload of shared storage exact",
)

INVALID_NORM = UpstreamFix(
    name="skip_invalid_norm",
    symbol="DeepSpeedZeroOptimizer_Stage3.step",
    reason="squares the -1 that stands for a norm that isn't finite, and updates the weights with NaNs",
    affected="0.19.7 and earlier",
    mended=skips_invalid_norms,
    hooks=((("step",), "_overflow_check_and_loss_scale_update"), (("step",), "_get_norm_groups")),
    expires="DeepSpeed >= 0.19.8 is the oldest that is supported",
)


def tells_its_scaler(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class lets its GradScaler know of every step that it skips."""
    if not skips_invalid_norms(stage3):
        return True  # it's the scaler that skips
    names = ("_overflow_clean_up", "_loss_scale_update_and_overflow_cleanup")
    found = [getattr(stage3, name) for name in names if hasattr(stage3, name)]
    return any("torch_autocast_gradscaler" in referenced_names(method) for method in found)


SCALER_BACKS_OFF = UpstreamFix(
    name="lower_the_scale",
    symbol="DeepSpeedZeroOptimizer_Stage3._overflow_clean_up",
    reason="skips a step before torch's GradScaler hears of it, so under fp16 autocast the scale never falls",
    affected="0.19.8",
    mended=tells_its_scaler,
    hooks=(
        (("_loss_scale_update_and_overflow_cleanup", "_overflow_check_and_loss_scale_update"), "_overflow_clean_up"),
    ),
    expires="upstream tells its GradScaler of the steps that it skips",
)


def _gathered_parameters() -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters


KEEP_EDITS = UpstreamFix(
    name="keep_edits",
    symbol="DeepSpeedZeroOptimizer_Stage3.set_full_hp_param",
    reason="edits of masters don't reach weights, and edits of weights (GatheredParameters) don't reach masters",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("__init__",), "_link_all_hp_params"),),
    expires="upstream writes both; until it is noticed, ours finds nothing left to write",
    uses=(
        (lambda _: _gathered_parameters().__enter__, ("all_gather",)),
        (lambda _: _gathered_parameters()._partition_params, ("partition",)),
    ),
)

MOVE_EXACTLY = UpstreamFix(
    name="move_exactly",
    symbol="DeepSpeedZeroOptimizer_Stage3.offload_states",
    reason="moves masters and moments of FusedAdam only, and can restore stale weights",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(),
    expires="upstream moves every optimizer's states, shared storage included, exactly",
    uses=((lambda stage3: stage3.offload_states, ("lp_param_buffer", "offloaded_states")),),
)

MISSING_GRADIENTS = UpstreamFix(
    name="zero_missing_gradients",
    symbol="DeepSpeedZeroOptimizer_Stage3.partition_grads",
    reason="the gradient buffer outlives the step, so a parameter unused in this step moves by an older gradient",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("__init__",), "_link_all_hp_params"),
        (("_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",), "partition_grads"),
        (("overlapping_partition_gradients_reduce_epilogue",), "independent_gradient_partition_epilogue"),
        (("step",), "_pre_step"),
    ),
    expires="upstream clears what wasn't written; until it is noticed, ours writes zeros over zeros",
    uses=(
        (
            lambda stage3: stage3._setup_for_real_optimizer,
            ("_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",),
        ),
    ),
)

REFUSE_UNFROZEN = UpstreamFix(
    name="refuse_unfrozen",
    symbol="DeepSpeedZeroOptimizer_Stage3._get_trainable_parameter_groups",
    reason="a parameter that is unfrozen after set-up is never trained, without a word",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("__init__",), "_link_all_hp_params"), (("step",), "_pre_step")),
    expires="upstream trains such parameters or refuses them",
)

ACCUMULATE_BACKWARDS = UpstreamFix(
    name="accumulate_backwards",
    symbol="DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag",
    reason="counts micro-steps by forwards, so backwards within one training_step overwrite each other; and a step "
    "after zero_grad applies what was cleared",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("overlapping_partition_gradients_reduce_epilogue",), "independent_gradient_partition_epilogue"),
        (("step",), "_pre_step"),
    ),
    expires="upstream counts backwards, and updates nothing without gradients",
    uses=(
        (lambda stage3: stage3.clear_backward_seen_flag, ("micro_step_id", "_epilogue_ran_this_backward")),
        (lambda stage3: stage3.finalize_gradient_accumulation_boundary, ("_finalize_offload_gradient_accumulation",)),
    ),
)

KEEP_PARTIAL_GRADIENTS = UpstreamFix(
    name="keep_partial_gradients",
    symbol="DeepSpeedZeroOptimizer_Stage3._rigid_state_dict",
    reason="leaves out the gradients of a step that isn't complete yet",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("state_dict",), "_rigid_state_dict"), (("load_state_dict",), "_rigid_load_state_dict")),
    expires="upstream saves them",
    uses=((lambda stage3: stage3._setup_for_real_optimizer, ("grad_partitions_flat_buffer",)),),
)

ALIGN_SWAPPED_GRADIENTS = UpstreamFix(
    name="align_swapped_gradients",
    symbol="DeepSpeedZeroOptimizer_Stage3._swap_out_offload_fp32_gradients",
    reason="with the optimizer on NVMe, a gradient that begins between two blocks isn't read back from its file",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("partition_grads",), "_swap_out_offload_fp32_gradients"),),
    expires="upstream aligns where gradients begin; until it is noticed, ours cuts what needn't be cut",
    uses=((lambda stage3: stage3._configure_tensor_swapping, ("optimizer_swapper",)),),
)

GRAD_NORMS = UpstreamFix(
    name="coalesce_grad_norms",
    symbol="DeepSpeedZeroOptimizer_Stage3._get_norm_groups",
    reason="computes and reduces the gradient norm of one sub-group after the other, experts' twice",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("step",), "_get_norm_groups"),
        (("_get_norm_groups",), "get_grad_norm_direct"),
        (("get_grad_norm_direct",), "_assert_same_partition_group"),
        (("get_grad_norm_direct",), "_get_param_partition_group"),
        (("get_grad_norm_direct",), "_model_parallel_all_reduce"),
        (("get_grad_norm_direct",), "_autoep_expert_parallel_group"),
    ),
    expires="DeepSpeed reduces norms together",
)

BATCHED_STEP = UpstreamFix(
    name="batch_optimizer_step",
    symbol="DeepSpeedZeroOptimizer_Stage3.step",
    reason="calls the optimizer once per sub-group, with a flatten, a cast, a copy and an unflatten each, and torch's "
    "optimizers walk all parameter groups in every call",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("_prepare_sub_group",), "_prepare_fp32_grad_for_sub_group"),
        (("_reassign_or_swap_out_partitioned_parameters",), "_unflatten_partitioned_parameters"),
    ),
    expires="DeepSpeed merges the updates of sub-groups",
    order=(
        "_get_norm_groups",
        "_prepare_sub_group",
        "unscale_and_clip_grads",
        "_optimizer_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "_release_sub_group",
        "_post_step",
    ),
    uses=(
        (lambda stage3: stage3._optimizer_step, ("sub_group_to_group_id", "fp32_partitioned_groups_flat")),
        (lambda stage3: stage3.unscale_and_clip_grads, ("clip_grad", "loss_scale", "clamp")),
        (lambda stage3: stage3.independent_gradient_partition_epilogue, ("averaged_gradients",)),
    ),
)

PERSISTENT_GATHER = UpstreamFix(
    name="coalesce_persistent_gather",
    symbol="DeepSpeedZeroOptimizer_Stage3._post_step",
    reason="gathers persistent parameters by one collective each",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("step",), "_post_step"),),
    expires="DeepSpeed packs persistent parameters",
    uses=((lambda stage3: stage3._post_step, ("persistent_parameters", "all_gather")),),
)

RELEASE = UpstreamFix(
    name="skip_redundant_release",
    symbol="DeepSpeedZeroOptimizer_Stage3._partition_all_parameters",
    reason="walks all modules three times to release parameters that are released already",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("step",), "_partition_all_parameters"),
        (("_post_step",), "invalidate_secondary_tensor"),
    ),
    expires="DeepSpeed walks once",
    order=("_pre_step", "_partition_all_parameters"),
    uses=(
        (lambda stage3: stage3._partition_all_parameters, ("parameter_offload", "partition_all_parameters")),
        (
            lambda _: coordinator().__init__,
            (
                "_PartitionedParameterCoordinator__inflight_param_registry",
                "_PartitionedParameterCoordinator__n_available_params",
            ),
        ),
    ),
)

UPSTREAM_FIXES = (
    GRAD_CLEAR,
    MASTER_ALIAS,
    INVALID_NORM,
    SCALER_BACKS_OFF,
    MOVE_EXACTLY,
    KEEP_EDITS,
    MISSING_GRADIENTS,
    REFUSE_UNFROZEN,
    ACCUMULATE_BACKWARDS,
    KEEP_PARTIAL_GRADIENTS,
    ALIGN_SWAPPED_GRADIENTS,
    GRAD_NORMS,
    BATCHED_STEP,
    PERSISTENT_GATHER,
    RELEASE,
    GRADIENT_BUCKETS,
    LEAN_HOOKS,
    LEAN_LINEAR,
)


def parts_to_leave_out(stage3: type[Any]) -> dict[str, str | None]:
    """Parts of our optimizer that must not act on a given upstream class.

    Args:
        stage3: ``DeepSpeedZeroOptimizer_Stage3`` of the installed DeepSpeed.

    Returns:
        Name of the part → what upstream lacks for it, or None where upstream has the fix itself.
    """
    left_out: dict[str, str | None] = {}
    for fix in UPSTREAM_FIXES:
        missing = fix.missing_hooks(stage3)
        if missing:
            left_out[fix.name] = ", ".join(missing)
        elif fix.mended(stage3):
            left_out[fix.name] = None
    return left_out
