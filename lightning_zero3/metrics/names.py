"""Every metric that this package logs: name, unit, what it is, how ranks combine, and when it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEP_MICROSTEP = "step/step_microstep_ms"
FWD_MICROSTEP = "step/fwd_microstep_ms"
BWD_MICROSTEP = "step/bwd_microstep_ms"
STEP_TOTAL = "step/total_ms"
DATA_WAIT = "step/data_wait_ms"
TOKENS_PER_SECOND = "step/tokens_per_second"

GRAD_CLEAR_VISITS = "optim/grad_clear_visits"
GRAD_CLEAR_LIVE = "optim/grad_clear_live"
GRAD_CLEAR_US_PER_VISIT = "optim/grad_clear_us_per_visit"

COLLECTIVES_PER_STEP = "optim/collectives_per_step"
SKIPPED_STEPS = "optim/skipped_steps"

MEMORY_PREFIX = "memory/"
PEAK_ALLOCATED = "memory/peak_allocated_gib"
PEAK_RESERVED = "memory/peak_reserved_gib"
ALLOCATED_BETWEEN_STEPS = "memory/allocated_between_steps_gib"
HOST_RSS = "memory/host_rss_gib"
HOST_RSS_PEAK = "memory/host_rss_peak_gib"

LOSS = "train/loss"

OverRanks = Literal["maximum", "sum"]


@dataclass(frozen=True)
class MetricEntry:
    """One metric.

    Args:
        name: What loggers see.
        unit: Its unit.
        definition: What it is, and over what span it is measured.
        over_ranks: How the ranks' values become one.
        label: A few words for tables and charts.
    """

    name: str
    unit: str
    definition: str
    over_ranks: OverRanks
    label: str


METRICS: tuple[MetricEntry, ...] = (
    MetricEntry(
        STEP_MICROSTEP,
        "ms",
        "DeepSpeed's step_microstep timer: the engine's step(), of the micro-step that updates the weights.",
        "maximum",
        "optimizer step (step_microstep)",
    ),
    MetricEntry(
        FWD_MICROSTEP,
        "ms",
        "DeepSpeed's fwd_microstep timer of that micro-step; it holds all of training_step.",
        "maximum",
        "forward (fwd_microstep)",
    ),
    MetricEntry(
        BWD_MICROSTEP,
        "ms",
        "DeepSpeed's bwd_microstep timer of that micro-step, reduction of gradients included.",
        "maximum",
        "backward (bwd_microstep)",
    ),
    MetricEntry(
        STEP_TOTAL,
        "ms",
        "Wall time from the end of the last optimizer step's batch to the end of this one's, all micro-steps, data "
        "loading and callbacks included; validation in between excluded.",
        "maximum",
        "whole step",
    ),
    MetricEntry(
        DATA_WAIT,
        "ms",
        "Wall time between the end of a batch and the start of the next, summed over the optimizer step's micro-steps.",
        "maximum",
        "between batches (data, callbacks)",
    ),
    MetricEntry(
        TOKENS_PER_SECOND,
        "1/s",
        "Tokens of the optimizer step on all ranks, those that tensor-parallel peers share counted once, over the "
        "slowest rank's whole step.",
        "sum",
        "tokens per second, all ranks",
    ),
    MetricEntry(
        PEAK_ALLOCATED,
        "GiB",
        "Highest GPU memory in tensors since the last logged step (torch.cuda.max_memory_allocated).",
        "maximum",
        "GPU peak allocated",
    ),
    MetricEntry(
        PEAK_RESERVED,
        "GiB",
        "Highest GPU memory held by the allocator since the last logged step (torch.cuda.max_memory_reserved).",
        "maximum",
        "GPU peak reserved",
    ),
    MetricEntry(
        ALLOCATED_BETWEEN_STEPS,
        "GiB",
        "GPU memory in tensors after the optimizer step (torch.cuda.memory_allocated).",
        "maximum",
        "GPU allocated between steps",
    ),
    MetricEntry(
        HOST_RSS,
        "GiB",
        "Resident memory of the process after the optimizer step. Never GPU memory.",
        "maximum",
        "host resident memory",
    ),
    MetricEntry(
        HOST_RSS_PEAK,
        "GiB",
        "Highest resident memory of the process since it started, as the kernel counts it (ru_maxrss).",
        "maximum",
        "host resident memory, peak",
    ),
    MetricEntry(
        GRAD_CLEAR_VISITS,
        "parameters",
        "Parameters that the optimizer step visited to clear gradients, each as often as it was visited. Only with "
        "Zero3Monitor(grad_clear_census=True).",
        "maximum",
        "gradient clear, visits",
    ),
    MetricEntry(
        GRAD_CLEAR_LIVE,
        "parameters",
        "Of those visits, the ones that found a gradient.",
        "maximum",
        "gradient clear, live gradients found",
    ),
    MetricEntry(
        GRAD_CLEAR_US_PER_VISIT,
        "µs",
        "Host time of the step's clears, over their visits.",
        "maximum",
        "gradient clear, time per visit",
    ),
    MetricEntry(
        COLLECTIVES_PER_STEP,
        "collectives",
        "Collectives that the optimizer step launched, those of forward and backward excluded. Only with "
        "Zero3Monitor(collective_census=True).",
        "maximum",
        "collectives per optimizer step",
    ),
    MetricEntry(
        SKIPPED_STEPS,
        "steps",
        "Optimizer steps that were skipped for a gradient that is infinite or no number, since training began, over "
        "resumes. They don't count in global_step.",
        "maximum",
        "skipped optimizer steps",
    ),
)

BY_NAME = {entry.name: entry for entry in METRICS}
