# SPDX-License-Identifier: Apache-2.0
"""The strategy's own options: declared, typed and validated here, and nowhere else.

Everything that DeepSpeed already has a name for stays DeepSpeed's (``DeepSpeedStrategy``'s arguments and the config
dict); these are only the options that this package adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args


class SetupError(ValueError):
    """What was asked for can't be set up; the message says what to change. Raised before anything is trained."""


class ConfigConflictError(SetupError):
    """Two places say different things about one setting; the message names both and the way out."""


# Parts of the optimizer that can be compared with and without.
Switch = Literal[
    "scoped_grad_clear",
    "alias_master_weights",
    "coalesce_grad_norms",
    "batch_optimizer_step",
    "coalesce_persistent_gather",
    "skip_redundant_release",
    "bucket_per_process_group",
    "lean_hooks",
    "lean_linear",
]
# Options that leave nothing but DeepSpeed's own step and numbers: what to measure the others against.
STOCK: dict[str, bool] = {**dict.fromkeys(get_args(Switch), False), "stock_semantics": True}
_SWITCHES = (*get_args(Switch), "verify_parallel", "async_save", "stock_semantics", "trust_checkpoint")


@dataclass(frozen=True, kw_only=True)
class StepSwitches:
    """Those of :class:`Zero3Options` that the optimizer reads; they are explained there."""

    scoped_grad_clear: bool = True
    alias_master_weights: bool = True
    coalesce_grad_norms: bool = True
    batch_optimizer_step: bool = True
    coalesce_persistent_gather: bool = True
    skip_redundant_release: bool = True
    bucket_per_process_group: bool = True
    lean_hooks: bool = True
    lean_linear: bool = True
    step_bytes_budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class Zero3Options(StepSwitches):
    """Options of the ``zero3_fast`` strategies.

    Args:
        scoped_grad_clear: Visit each parameter once per optimizer step to clear gradients, instead of once per
            sub-group. Where the installed DeepSpeed clears once per step (0.19.8), its own clear is used.
        alias_master_weights: Let a sub-group's weight partition be its master copy where the two would be identical
            (same dtype, same device, nothing offloaded).
        coalesce_grad_norms: Compute the gradient norms of all sub-groups together, with one reduction per process
            group instead of one or two per sub-group.
        batch_optimizer_step: Call the optimizer once for many sub-groups, where it is known to treat each tensor for
            itself: torch's Adam, AdamW and SGD, DeepSpeed's FusedAdam and CPUAdam. Any other optimizer, offload,
            ZenFlow and Muon take upstream's step.
        coalesce_persistent_gather: Gather the persistent parameters after the step by one collective per process group
            and dtype, instead of one per parameter.
        skip_redundant_release: Before the step, release only parameters that are still gathered, in one pass.
        bucket_per_process_group: Let gradients of two process groups (AutoEP's experts and all other parameters) wait
            for their reductions side by side in the one bucket, instead of one after the other.
        lean_hooks: Around each module's forward and backward do only what is needed: nothing for modules without
            parameters, no wrappers, no inspection of signatures; copy a bucket's gradients in one call; count devices
            once instead of in every reduction.
        lean_linear: Call the function that DeepSpeed puts in linear layers without an inspection of its signature.
        step_bytes_budget: Bytes of gradients, in the masters' dtype, that one call to the optimizer updates; at least
            one sub-group's. ``None``: as many as fit in memory that is idle during the step (the reduction bucket),
            such that the step's peak is no higher than stock's.
        expert_parallel_size: Number of ranks that share one set of experts. ``None`` leaves the model's MoE layers as
            they are; 1 replaces them by AutoEP's layers with all experts on every rank.
        expert_parallel_preset: Name of DeepSpeed's AutoEP preset; ``None`` resolves it from the model's config.
        router_bias_update_speed: How far a router's correction bias moves after each optimizer step, to even out the
            experts' loads without an auxiliary loss; ``None`` leaves biases as they are.
        tensor_parallel_size: Number of consecutive ranks that share each layer and see the same data. ``None`` and 1
            leave layers whole.
        verify_parallel: Before training, compare logits, losses and every gradient of a small copy of the model with
            plain Transformers, and raise where they differ. Needs ``expert_parallel_size`` or ``tensor_parallel_size``.
        async_save: Let training go on while a checkpoint is written out of a copy in host memory.
        stock_semantics: Give exactly ``deepspeed_stage_3``'s numbers, its known faults included: none of the
            corrections that docs/corrections.md lists is applied.
        resume_layout: ``"universal"``: a fit goes on from a sharded checkpoint of other numbers of ranks, other expert
            or tensor parallel sizes, or another order of parameters; each rank reads its share of masters and moments
            from all ranks' files. ``None``: such a checkpoint is refused.
        trust_checkpoint: Read checkpoints without a restriction, as DeepSpeed does. Whatever code is in them is run:
            only for files whose every writer you trust.

    Raises:
        TypeError: A switch is no bool, a size or a budget no int, a speed no number, or a preset no string.
        ValueError: A size or a budget below 1, a speed that isn't above 0, a preset without a size, or an unknown
            layout.

    >>> Zero3Options(expert_parallel_size=8).expert_parallel_size
    8
    >>> Zero3Options(expert_parallel_size=0)
    Traceback (most recent call last):
    ...
    ValueError: expert_parallel_size=0: a whole number of ranks, 1 or more, or None for no expert parallelism.
    """

    expert_parallel_size: int | None = None
    expert_parallel_preset: str | None = None
    router_bias_update_speed: float | None = None
    tensor_parallel_size: int | None = None
    verify_parallel: bool = False
    async_save: bool = False
    stock_semantics: bool = False
    resume_layout: str | None = None
    trust_checkpoint: bool = False

    def __post_init__(self) -> None:
        """Check every field's type and range."""
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: True or False.")
        budget = self.step_bytes_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise TypeError(f"step_bytes_budget={budget!r}: an int, or None for no more memory than stock's step.")
        if budget is not None and budget < 1:
            raise ValueError(
                f"step_bytes_budget={budget}: 1 byte or more, or None for no more memory than stock's step."
            )
        for name, what in (("expert_parallel_size", "expert"), ("tensor_parallel_size", "tensor")):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise TypeError(f"{name}={size!r}: an int, or None for no {what} parallelism.")
            if size is not None and size < 1:
                raise ValueError(
                    f"{name}={size}: a whole number of ranks, 1 or more, or None for no {what} parallelism."
                )
        preset = self.expert_parallel_preset
        if preset is not None and not isinstance(preset, str):
            raise TypeError(f"expert_parallel_preset={preset!r}: the name of an AutoEP preset, or None.")
        if preset is not None and self.expert_parallel_size is None:
            raise ValueError(
                f"expert_parallel_preset={preset!r} without expert_parallel_size has no effect: pass both or neither."
            )
        if self.resume_layout not in (None, "universal"):
            raise ValueError(
                f'resume_layout={self.resume_layout!r}: "universal" to go on from a checkpoint of another layout of '
                "ranks, or None to refuse it."
            )
        speed = self.router_bias_update_speed
        if speed is not None and (isinstance(speed, bool) or not isinstance(speed, int | float)):
            raise TypeError(f"router_bias_update_speed={speed!r}: a number, or None to leave correction biases alone.")
        if speed is not None and not 0 < speed < math.inf:
            raise ValueError(
                f"router_bias_update_speed={speed}: above 0 (DeepSeek-V3: 0.001), or None to leave correction biases "
                "as they are."
            )
