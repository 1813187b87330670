# SPDX-License-Identifier: Apache-2.0
"""What of DeepSpeed's forward and backward this package works around, found by probing: a part of ``capabilities``.

Each :class:`UpstreamFix` names all that its part reads or replaces, so that another layout leaves the part out.
"""

from __future__ import annotations

from typing import Any

from lightning_zero3.capabilities.probing import UpstreamFix, not_mended


def _offload() -> Any:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return DeepSpeedZeRoOffload


def coordinator() -> Any:
    """DeepSpeed's class that gathers and releases parameters."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    return PartitionedParameterCoordinator


def _partitioned() -> Any:
    from deepspeed.runtime.zero.partition_parameters import Init

    return Init


def _linear_function() -> Any:
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    return LinearFunctionForZeroStage3


GRADIENT_BUCKETS = UpstreamFix(
    name="bucket_per_process_group",
    symbol="DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads",
    reason="has one bucket per dtype and reduces it whenever the next gradient belongs to another process group",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=(
        (("reduce_ready_partitions_and_remove_grads",), "reduce_independent_p_g_buckets_and_remove_grads"),
        (
            ("reduce_independent_p_g_buckets_and_remove_grads",),
            "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        ),
        (("reduce_independent_p_g_buckets_and_remove_grads",), "_get_param_partition_group"),
        (("overlapping_partition_gradients_reduce_epilogue",), "independent_gradient_partition_epilogue"),
        (("step",), "_pre_step"),
    ),
    expires="DeepSpeed keeps its buckets by process group",
    uses=(
        (
            lambda stage3: stage3.reduce_independent_p_g_buckets_and_remove_grads,
            ("ipg_buckets", "get_param_comm_dtype", "process_group", "reduce_bucket_size", "elements"),
        ),
        (
            lambda stage3: stage3._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket,
            ("buffer", "narrow", "contiguous_gradients", "zenflow"),
        ),
        (lambda stage3: stage3._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads, ("reduce_scatter",)),
    ),
)

# What upstream's hooks keep on modules, bound to their engine; the next engine would take it for its own.
LEFT_ON_MODULES = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining")

_PRIVATE = "_PartitionedParameterCoordinator__"
_ACTIVE = f"{_PRIVATE}active_backward_submodules"
LEAN_HOOKS = UpstreamFix(
    name="lean_hooks",
    symbol="DeepSpeedZeRoOffload._register_deepspeed_module",
    reason="four hooks and two autograd functions around each module, those without parameters too, inside of wrappers",
    affected="0.19.8 and earlier",
    mended=not_mended,
    hooks=((("__init__",), "initialize_ds_offload"),),
    expires="upstream's hooks cost a third of what they do",
    uses=(
        (lambda stage3: stage3.initialize_ds_offload, ("DeepSpeedZeRoOffload",)),
        (
            lambda _: _offload()._register_deepspeed_module,
            (
                "pre_bwd_fn",
                "post_bwd_fn",
                "applied_pre_backward_ref_cnt",
                "ds_grads_remaining",
                "forward_hooks",
                "backward_hooks",
                "pre_sub_module_forward_function",
                "post_sub_module_forward_function",
                "pre_sub_module_backward_function",
                "post_sub_module_backward_function",
            ),
        ),
        (lambda _: _offload().setup_zero_stage3_hooks, ("_register_deepspeed_module",)),
        (lambda _: _offload().pre_sub_module_forward_function, ("FWD_MODULE_STACK", "fetch_sub_module")),
        (lambda _: _offload().post_sub_module_forward_function, ("release_sub_module",)),
        (lambda _: coordinator().fetch_sub_module, (_ACTIVE, "_fetch_sub_module_impl")),
        (
            lambda _: coordinator()._fetch_sub_module_impl,
            (
                "iter_params",
                "ds_status",
                "ds_active_sub_modules",
                "handles_memory_backpressure",
                "resolves_data_dependency",
                *(
                    _PRIVATE + name
                    for name in (
                        "active_backward_submodules",
                        "step_id",
                        "param_queue",
                        "most_recent_step_id_param_fetched_for",
                        "inflight_param_registry",
                        "n_available_params",
                        "max_n_available_params",
                        "prefetch_bucket_sz",
                        "prefetch_nvme",
                    )
                ),
            ),
        ),
        (lambda _: coordinator().trace_prologue, (f"{_PRIVATE}submodule_order", f"{_PRIVATE}step_id")),
        (lambda _: coordinator().is_complete_trace, (f"{_PRIVATE}trace_mode",)),
        (
            lambda _: coordinator().release_sub_module,
            (
                _ACTIVE,
                "iter_params",
                "ds_recompute_parameters",
                "is_external_param",
                f"{_PRIVATE}params_to_release",
                f"{_PRIVATE}release_param",
            ),
        ),
        (
            lambda _: coordinator()._PartitionedParameterCoordinator__release_param,
            ("ds_active_sub_modules", "partition", f"{_PRIVATE}n_available_params"),
        ),
        (lambda _: _partitioned()._partition_param, ("free_param", "final_location", "ds_tensor")),
        (lambda stage3: stage3.create_reduce_and_remove_grad_hooks, ("register_grad_hook",)),
        (
            lambda stage3: stage3.partition_grads,
            ("micro_step_id", "_offload_boundary_param_ids", "gradient_accumulation_dtype", "offload_optimizer"),
        ),
        (lambda stage3: stage3._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket, ("ipg_buckets",)),
    ),
)


def needs_no_signature(stage3: type[Any]) -> bool:  # noqa: ARG001
    """Whether DeepSpeed's linear function has no ``setup_context``."""
    return "setup_context" not in vars(_linear_function())


LEAN_LINEAR = UpstreamFix(
    name="lean_linear",
    symbol="deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3",
    reason="has a setup_context, for which torch inspects a signature in every call",
    affected="0.19.8 and earlier",
    mended=needs_no_signature,
    hooks=((("__init__",), "initialize_ds_offload"),),
    expires="torch caches signatures, or DeepSpeed's function needs none",
    uses=(
        (lambda _: _linear_function().setup_context, ("_dtype", "_fwd_used_autocast", "save_for_backward")),
        (
            lambda _: _linear_function().backward,
            ("autocast", "_dtype", "_fwd_used_autocast", "saved_tensors", "needs_input_grad"),
        ),
    ),
)
