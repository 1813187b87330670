# SPDX-License-Identifier: Apache-2.0
"""Every metric that this package logs: name, unit, what it is, how ranks combine, and when it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEP_MICROSTEP = "step/step_microstep_ms"
FWD_MICROSTEP = "step/fwd_microstep_ms"
BWD_MICROSTEP = "step/bwd_microstep_ms"
FWD = "step/fwd_ms"
BWD = "step/bwd_ms"
BWD_INNER = "step/bwd_inner_ms"
BWD_ALLREDUCE = "step/bwd_allreduce_ms"
OPTIMIZER_STEP = "step/optimizer_step_ms"
STEP_TOTAL = "step/total_ms"
DATA_WAIT = "step/data_wait_ms"
TOKENS_PER_SECOND = "step/tokens_per_second"
DEVICE_TOKENS_PER_SECOND = "step/tokens_per_second_per_device"
MFU = "step/mfu"

LOSS_OF_STEP = "optim/loss"
LEARNING_RATE = "optim/learning_rate"
GRAD_NORM = "optim/grad_norm"
SUB_GROUPS = "optim/sub_groups"
SKIPPED_STEPS = "optim/skipped_steps"
COLLECTIVES_PER_STEP = "optim/collectives_per_step"
GRAD_CLEAR_VISITS = "optim/grad_clear_visits"
GRAD_CLEAR_LIVE = "optim/grad_clear_live"
GRAD_CLEAR_US_PER_VISIT = "optim/grad_clear_us_per_visit"

MEMORY_PREFIX = "memory/"
PEAK_ALLOCATED = "memory/peak_allocated_gib"
PEAK_RESERVED = "memory/peak_reserved_gib"
ALLOCATED_BETWEEN_STEPS = "memory/allocated_between_steps_gib"
ALLOCATOR_RETRIES = "memory/allocator_retries"
HOST_RSS = "memory/host_rss_gib"
HOST_RSS_PEAK = "memory/host_rss_peak_gib"

EXPERT_LOAD = "moe/expert_load_max_over_mean"
EXPERT_ENTROPY = "moe/expert_entropy"
DEAD_EXPERTS = "moe/dead_experts"

# The user's own, by the name that the recipes give it; Zero3Monitor doesn't log it.
LOSS = "train/loss"

SPREAD_PREFIX = "ranks/"

OverRanks = Literal["maximum", "sum", "mean", "counts", "minimum", "rank"]

# When something is measured.
_MICRO = "the step's last micro-step"
_WHOLE = "the whole step, all micro-steps"
_BETWEEN = "between batches"
_AFTER = "after the step"
_SINCE = "since the last logged step"
_IN_STEP = "during the optimizer's step"


@dataclass(frozen=True)
class MetricEntry:
    """One metric.

    Args:
        name: What loggers see.
        unit: Its unit.
        definition: What it is.
        over_ranks: How the ranks' values become one. ``"counts"``: the ranks' counts are added up first.
        measured: Over what span, or at which time.
        label: A few words for tables and charts.
        spread: Whether the minimum and the rank of the maximum are logged beside it (:func:`spread_of`).
        per_layer: Whether it is also logged for each layer, under the name with ``/layer_N``.
    """

    name: str
    unit: str
    definition: str
    over_ranks: OverRanks
    measured: str
    label: str
    spread: bool = False
    per_layer: bool = False


def spread_of(entry: MetricEntry) -> tuple[MetricEntry, MetricEntry]:
    """The two metrics that tell how ranks differ: the smallest value, and which rank has the largest.

    >>> [each.name for each in spread_of(BY_NAME[STEP_TOTAL])]
    ['ranks/total_min_ms', 'ranks/total_max_rank']
    """
    stem, _, suffix = entry.name.split("/")[1].rpartition("_")
    smallest = MetricEntry(
        f"{SPREAD_PREFIX}{stem}_min_{suffix}",
        entry.unit,
        f"The smallest `{entry.name}` of all ranks. Only with several ranks.",
        "minimum",
        entry.measured,
        f"{entry.label}, smallest of all ranks",
    )
    where = MetricEntry(
        f"{SPREAD_PREFIX}{stem}_max_rank",
        "rank",
        f"Which rank has the largest `{entry.name}`, the first of them. Only with several ranks.",
        "rank",
        entry.measured,
        f"{entry.label}, rank of the largest",
    )
    return smallest, where


def of_layer(name: str, layer: str) -> str:
    """The name of a metric for one layer.

    >>> of_layer(EXPERT_ENTROPY, "layer_3")
    'moe/expert_entropy/layer_3'
    """
    return f"{name}/{layer}"


def _timer(name: str, upstream: str, what: str, measured: str, label: str) -> MetricEntry:
    return MetricEntry(name, "ms", f"DeepSpeed's {upstream} timer: {what}", "maximum", measured, label, spread=True)


_STEP = (
    _timer(
        STEP_MICROSTEP,
        "step_microstep",
        "the engine's step(), of the micro-step that updates the weights.",
        _MICRO,
        "optimizer step (step_microstep)",
    ),
    _timer(
        FWD_MICROSTEP,
        "fwd_microstep",
        "the forward of that micro-step; it holds all of training_step.",
        _MICRO,
        "forward (fwd_microstep)",
    ),
    _timer(
        BWD_MICROSTEP,
        "bwd_microstep",
        "the backward of that micro-step, reduction of gradients included.",
        _MICRO,
        "backward (bwd_microstep)",
    ),
    _timer(FWD, "fwd", "all forwards of the step; validation's aren't in it.", _WHOLE, "forward, all micro-steps"),
    _timer(BWD, "bwd", "all backwards of the step.", _WHOLE, "backward, all micro-steps"),
    _timer(
        BWD_INNER,
        "bwd_inner",
        "the backwards without what follows them, reductions that run beside them included.",
        _WHOLE,
        "backward without the rest of the reduction",
    ),
    _timer(
        BWD_ALLREDUCE,
        "bwd_allreduce",
        "what is left to reduce when a backward has ended.",
        _WHOLE,
        "reduction after backward",
    ),
    _timer(
        OPTIMIZER_STEP,
        "optimizer_step",
        "the optimizer's update inside step_microstep, without the gradient norm before and the gather after it. "
        "Absent where the user's own config has wall_clock_breakdown.",
        _IN_STEP,
        "optimizer's update",
    ),
    MetricEntry(
        STEP_TOTAL,
        "ms",
        "Wall time from the end of the last optimizer step's batch to the end of this one's, all micro-steps, data "
        "loading and callbacks included; validation in between excluded.",
        "maximum",
        _WHOLE,
        "whole step",
        spread=True,
    ),
    MetricEntry(
        DATA_WAIT,
        "ms",
        "Wall time between the end of a batch and the start of the next, summed over the optimizer step's micro-steps.",
        "maximum",
        _BETWEEN,
        "between batches (data, callbacks)",
        spread=True,
    ),
    MetricEntry(
        TOKENS_PER_SECOND,
        "1/s",
        "Tokens of the optimizer step on all ranks, those that tensor-parallel peers share counted once, over the "
        "slowest rank's whole step.",
        "sum",
        _WHOLE,
        "tokens per second, all ranks",
    ),
    MetricEntry(
        DEVICE_TOKENS_PER_SECOND,
        "1/s",
        "The same over the number of ranks.",
        "sum",
        _WHOLE,
        "tokens per second and device",
    ),
    MetricEntry(
        MFU,
        "1",
        "Model FLOPs utilisation: the FLOPs that the step's tokens need (forward, backward, no recomputation; the "
        "experts that a token goes to; attention at the batch's lengths, each token seeing itself and those before "
        "it), over the slowest rank's whole step and the peak of all devices, after arXiv:2204.02311, appendix B. "
        "Padding counts as tokens; images and a vision tower don't count. Only for models whose FLOPs and hardware "
        "whose peak are known, or given by Zero3Monitor(flops_per_batch=..., peak_flops=...).",
        "sum",
        _WHOLE,
        "model FLOPs utilisation",
    ),
)

_MEMORY = (
    MetricEntry(
        PEAK_ALLOCATED,
        "GiB",
        "Highest GPU memory in tensors (torch.cuda.max_memory_allocated). With DeepSpeed's memory_breakdown, which "
        "resets the peaks itself, of a shorter span.",
        "maximum",
        _SINCE,
        "GPU peak allocated",
        spread=True,
    ),
    MetricEntry(
        PEAK_RESERVED,
        "GiB",
        "Highest GPU memory held by the allocator (torch.cuda.max_memory_reserved).",
        "maximum",
        _SINCE,
        "GPU peak reserved",
        spread=True,
    ),
    MetricEntry(
        ALLOCATED_BETWEEN_STEPS,
        "GiB",
        "GPU memory in tensors after the optimizer step (torch.cuda.memory_allocated).",
        "maximum",
        _AFTER,
        "GPU allocated between steps",
        spread=True,
    ),
    MetricEntry(
        ALLOCATOR_RETRIES,
        "retries",
        "How often the GPU's allocator had to give back its cache and ask again (num_alloc_retries), since the process "
        "began. Each stalls the device.",
        "maximum",
        _AFTER,
        "GPU allocator retries",
    ),
    MetricEntry(
        HOST_RSS,
        "GiB",
        "Resident memory of the process after the optimizer step. Never GPU memory.",
        "maximum",
        _AFTER,
        "host resident memory",
        spread=True,
    ),
    MetricEntry(
        HOST_RSS_PEAK,
        "GiB",
        "Highest resident memory of the process since it started, as the kernel counts it (ru_maxrss).",
        "maximum",
        _AFTER,
        "host resident memory, peak",
        spread=True,
    ),
)

_OPTIMIZER = (
    MetricEntry(
        LOSS_OF_STEP,
        "1",
        "The loss whose gradients the step used: the mean over its micro-batches and ranks of what training_step "
        "returned. Only with automatic optimization.",
        "mean",
        _WHOLE,
        "loss",
    ),
    MetricEntry(
        LEARNING_RATE,
        "1",
        "Learning rate that the step used, of the optimizer's first parameter group.",
        "maximum",
        "before the step",
        "learning rate",
    ),
    MetricEntry(
        GRAD_NORM,
        "1",
        "Norm of all gradients, unscaled, before clipping, as DeepSpeed computes it. Absent for a skipped step.",
        "maximum",
        _IN_STEP,
        "gradient norm",
    ),
    MetricEntry(
        SUB_GROUPS,
        "sub-groups",
        "Sub-groups that the Stage-3 optimizer has on a rank.",
        "maximum",
        _AFTER,
        "optimizer sub-groups",
    ),
    MetricEntry(
        SKIPPED_STEPS,
        "steps",
        "Optimizer steps that were skipped for a gradient that is infinite or no number, since training began, over "
        "resumes. They don't count in global_step.",
        "maximum",
        _AFTER,
        "skipped optimizer steps",
    ),
    MetricEntry(
        COLLECTIVES_PER_STEP,
        "collectives",
        "Collectives that the optimizer step launched, those of forward and backward excluded. Only with "
        "Zero3Monitor(collective_census=True).",
        "maximum",
        _IN_STEP,
        "collectives per optimizer step",
    ),
    MetricEntry(
        GRAD_CLEAR_VISITS,
        "parameters",
        "Parameters that the optimizer step visited to clear gradients, each as often as it was visited. Only with "
        "Zero3Monitor(grad_clear_census=True).",
        "maximum",
        _IN_STEP,
        "gradient clear, visits",
    ),
    MetricEntry(
        GRAD_CLEAR_LIVE,
        "parameters",
        "Of those visits, the ones that found a gradient.",
        "maximum",
        _IN_STEP,
        "gradient clear, live gradients found",
    ),
    MetricEntry(
        GRAD_CLEAR_US_PER_VISIT,
        "µs",
        "Host time of the step's clears, over their visits.",
        "maximum",
        _IN_STEP,
        "gradient clear, time per visit",
    ),
)

_EXPERTS = (
    MetricEntry(
        EXPERT_LOAD,
        "1",
        "Tokens of a layer's fullest expert over the mean of its experts: 1 is even. Over all layers: the highest. "
        "Tokens of all ranks that a backward ran for: no validation, and recomputed forwards once.",
        "counts",
        _WHOLE,
        "expert load, fullest over mean",
        per_layer=True,
    ),
    MetricEntry(
        EXPERT_ENTROPY,
        "1",
        "Entropy of the experts' shares of a layer's tokens, over that of equal shares: 1 is even, 0 is a single "
        "expert. Over all layers: the lowest.",
        "counts",
        _WHOLE,
        "expert entropy, of 1",
        per_layer=True,
    ),
    MetricEntry(
        DEAD_EXPERTS,
        "experts",
        "Experts of a layer that no token went to. Over all layers: their sum.",
        "counts",
        _WHOLE,
        "dead experts",
        per_layer=True,
    ),
)

_MEASURED = _STEP + _MEMORY + _OPTIMIZER + _EXPERTS
METRICS: tuple[MetricEntry, ...] = _MEASURED + tuple(
    each for entry in _MEASURED if entry.spread for each in spread_of(entry)
)

BY_NAME = {entry.name: entry for entry in METRICS}
