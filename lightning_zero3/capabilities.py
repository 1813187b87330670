"""What the installed DeepSpeed, Lightning and Transformers do and allow, found by probing, not by version numbers.

Each :class:`UpstreamFix` is one thing in DeepSpeed's Stage-3 optimizer that this package works around: where, why, how
it is detected and what ends it. A part steps aside where upstream has the fix, and where upstream no longer calls what
the part hangs on. Each :class:`UpstreamLimit` is one thing that the installed packages can't do together.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class UpstreamFix:
    """One fault or gap upstream that this package handles until upstream does.

    Args:
        name: The switch or part that handles it.
        symbol: The upstream symbol.
        reason: What is wrong there.
        affected: Releases in which it was seen.
        mended: Reads the given upstream class and tells whether upstream has the fix.
        hooks: Pairs of an upstream method and a method that it must call for our part to work. A tuple of callers
            means any one of them.
        expires: What makes our part superfluous.
        order: Methods that upstream's ``step`` must call once each, in this order.
        uses: Names that upstream's code must refer to: a function that finds the code, and the names.
    """

    name: str
    symbol: str
    reason: str
    affected: str
    mended: Callable[[type[Any]], bool]
    hooks: tuple[tuple[tuple[str, ...], str], ...]
    expires: str
    order: tuple[str, ...] = ()
    uses: tuple[tuple[Callable[[type[Any]], Callable[..., Any]], tuple[str, ...]], ...] = ()

    def missing_hooks(self, stage3: type[Any]) -> list[str]:
        """Calls that this part relies on and the given class doesn't make, in words."""
        missing = [
            f"{' or '.join(callers)} calling {callee}"
            for callers, callee in self.hooks
            if not hasattr(stage3, callee) or not any(_calls(stage3, caller, callee) for caller in callers)
        ]
        if self.order and calls_among(stage3.step, self.order) != list(self.order):
            missing.append(f"step calling {', '.join(self.order)} once each and in this order")
        for find, names in self.uses:
            try:
                absent = [name for name in names if name not in referenced_names(find(stage3))]
            except AttributeError as error:
                absent = [str(error)]
            missing += [f"a use of {name}" for name in absent]
        return missing


def referenced_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names that a function's code refers to, nested functions included.

    DeepSpeed's ``instrument_w_nvtx`` wraps without setting ``__wrapped__``, so the wrapped function is taken out of
    the wrapper's closure.

    >>> def outer():
    ...     return len([abs(n) for n in ()])
    >>> sorted(referenced_names(outer) & {"len", "abs", "sum"})
    ['abs', 'len']
    """
    names: set[str] = set()
    pending: list[CodeType] = [_unwrapped(function).__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names)


def calls_among(function: Callable[..., Any], methods: Collection[str]) -> list[str]:
    """Which of some methods a function's own code looks up, as often and in the order in which it does.

    >>> def outer(self):
    ...     self.a()
    ...     for _ in range(3):
    ...         self.b(self.c)
    >>> calls_among(outer, {"a", "b", "c"})
    ['a', 'b', 'c']
    """
    return [
        instruction.argval
        for instruction in dis.get_instructions(_unwrapped(function))
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in methods
    ]


def _unwrapped(function: Callable[..., Any]) -> FunctionType:
    found: Any = inspect.unwrap(function)
    while getattr(found, "__name__", "") == "wrapped_fn" and found.__closure__:
        inner = [cell.cell_contents for cell in found.__closure__ if inspect.isfunction(cell.cell_contents)]
        if len(inner) != 1:
            break
        found = inspect.unwrap(inner[0])
    if not inspect.isfunction(found):
        raise TypeError(f"{function!r} is no Python function, so its code can't be read.")
    return found


def clears_once_per_step(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class clears gradients in ``step`` and no longer per sub-group."""
    return "zero_grad" not in referenced_names(stage3._prepare_fp32_grad_for_sub_group)


def aliases_master_weights(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class compares devices in a way that can be true.

    The dead comparison is ``tensor.device == self.device`` with a string on the right. A mended one wraps the string
    in ``torch.device``, which then appears among the names next to ``device``.
    """
    source = inspect.getsource(_unwrapped(stage3._create_fp32_partitions))
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


def not_mended(stage3: type[Any]) -> bool:  # noqa: ARG001
    """No release has it yet, so there is nothing to tell it by."""
    return False


def _coordinators_constructor(_: type[Any]) -> Callable[..., Any]:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    constructor: Callable[..., Any] = PartitionedParameterCoordinator.__init__
    return constructor


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
            _coordinators_constructor,
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
    GRAD_NORMS,
    BATCHED_STEP,
    PERSISTENT_GATHER,
    RELEASE,
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


def _calls(stage3: type[Any], caller: str, callee: str) -> bool:
    return hasattr(stage3, caller) and callee in referenced_names(getattr(stage3, caller))


@dataclass(frozen=True)
class UpstreamLimit:
    """Something that the installed packages can't do, so that we refuse it or do it in another way.

    Args:
        name: A short name.
        symbol: The upstream symbol.
        reason: What is missing or doesn't fit.
        affected: Releases in which it was seen.
        present: Probes the installed packages.
        consequence: What a user is told, or what we do instead.
        expires: What ends it.
    """

    name: str
    symbol: str
    reason: str
    affected: str
    present: Callable[[], bool]
    consequence: str
    expires: str


def output_recorders_break() -> bool:
    """Whether DeepSpeed's AutoEP can't talk to Transformers' registry of output recorders.

    DeepSpeed uses it as a dict of strings, with a default; from Transformers 5.23 on it is keyed by the model.
    """
    try:
        from transformers.utils import output_capturing

        output_capturing._CAN_RECORD_REGISTRY.get("a name that nothing has", None)
    except ImportError:
        return False
    except (TypeError, AttributeError):
        return True
    return False


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


OUTPUT_RECORDERS = UpstreamLimit(
    name="output recorders",
    symbol="transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
    reason="is keyed by the model, while DeepSpeed's AutoEP adapters use it as a dict of strings",
    affected="Transformers 5.23 and later with DeepSpeed 0.19.8 and earlier",
    present=output_recorders_break,
    consequence="presets that move recorders (mixtral, qwen3_moe, qwen3_5_moe, minimax_m3) are refused",
    expires="DeepSpeed passes the model",
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
)

UPSTREAM_LIMITS = (OUTPUT_RECORDERS, PARTITIONED_INITIALISATION, LIGHTNING_ON_CPU)
