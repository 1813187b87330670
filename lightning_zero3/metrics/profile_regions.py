# SPDX-License-Identifier: Apache-2.0
"""Named regions of a step, for the steps that are profiled: which methods are which phase.

Methods of one engine and its optimizer are wrapped on these objects, and put back: the code itself carries no region.

Upstream symbols, each wrapped where it exists (0.19.7, 0.19.8): ``forward``, ``backward``, ``allreduce_gradients`` and
``step`` of ``DeepSpeedEngine``; those of :data:`OF_THE_OPTIMIZER` on the Stage-3 optimizer, upstream's or ours;
``fp16_groups`` is read. Expires when DeepSpeed names its phases by ``record_function``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from lightning_zero3.collective_counts import CountingBackend, counted_collectives
from lightning_zero3.substitution import substituted

WHOLE_STEP = "whole step"
FORWARD, BACKWARD, REDUCTION, ENGINE_STEP = "forward", "backward", "gradient reduction", "engine step"
STEP, CLEAR, RELEASE = "optimizer step", "gradient clear", "release"
NORMS, MERGED_UPDATE, GATHER, OPTIMIZER = "norms", "merged update", "persistent gather", "optimizer call"

_OF_THE_ENGINE = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "allreduce_gradients": REDUCTION,
    "step": ENGINE_STEP,
}
# Method → phase, in the order in which a step comes to them.
OF_THE_OPTIMIZER = {
    "step": STEP,
    "_pre_step": "before the step",
    "_partition_all_parameters": RELEASE,
    "_overflow_check_and_loss_scale_update": "overflow check",
    "_loss_scale_update_and_overflow_cleanup": "overflow check",
    "_get_norm_groups": NORMS,
    "zero_grad": CLEAR,
    "_prepare_sub_group": "prepare sub-group",
    "unscale_and_clip_grads": "unscale and clip",
    "_optimizer_step": "update sub-group",
    "_reassign_or_swap_out_partitioned_parameters": "bind weights",
    "_release_sub_group": "release sub-group",
    # Of the merged step (optimizer/batched_step.py), chunk by chunk.
    "_update_all": MERGED_UPDATE,
    "_set_gradients": "chunk's gradients",
    "_copy_weights_back": "weights back",
    "_post_step": GATHER,
}
# Upstream's loop calls these for each sub-group; in a merged step they do nothing, so they get no region there.
_PER_SUB_GROUP = frozenset(
    {
        "_prepare_sub_group",
        "unscale_and_clip_grads",
        "_optimizer_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "_release_sub_group",
    }
)
# So that ours are told from everybody else's in a trace.
_MARK = "zero3: "


@dataclass
class Counted:
    """What was counted in one phase, what it called included.

    Args:
        calls: How often it was entered.
        collectives: Collectives that DeepSpeed launched.
        visits: Parameters that clears and the release visited; None where upstream's release did, which nobody counts.
    """

    calls: int = 0
    collectives: int = 0
    visits: int | None = 0


class Regions:
    """The phases of one engine's steps, as regions of torch's profiler, with what is counted in each.

    Args:
        engine: A DeepSpeed engine with a Stage-3 optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        # Phase, within the phases that it lies in → counts; in the order in which they were first left.
        self.counted: dict[tuple[str, ...], Counted] = {}
        # A region's name in the trace → the phase.
        self.labels: dict[str, tuple[str, ...]] = {}
        self._path: tuple[str, ...] = ()
        self._visits = 0
        self._uncounted = 0
        self._backend: CountingBackend | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the methods and count inside the block; everything is as it was afterwards."""
        optimizer = self._optimizer
        with ExitStack() as stack:
            for method, phase in _OF_THE_ENGINE.items():
                self._wrap(
                    stack, self._engine, method, phase, torch.is_grad_enabled if method == "forward" else _always
                )
            for method, phase in OF_THE_OPTIMIZER.items():
                self._wrap(stack, optimizer, method, phase, self._apart if method in _PER_SUB_GROUP else _always)
            self._wrap(stack, getattr(optimizer, "optimizer", None), "step", OPTIMIZER, _always)
            self._backend = stack.enter_context(counted_collectives())
            yield

    @contextmanager
    def region(self, phase: str, label: str | None = None) -> Iterator[None]:
        """One phase, within that which is going on.

        Args:
            phase: Its name.
            label: What the trace calls it; by default the phase with those that it lies in.
        """
        outside = self._path
        path = self._path = (*outside, phase)
        label = label or _MARK + " / ".join(path)
        self.labels[label] = path
        collectives, visits, uncounted = self._collectives(), self._visits, self._uncounted
        try:
            with record_function(label):
                yield
        finally:
            self._path = outside
            counted = self.counted.setdefault(path, Counted())
            counted.calls += 1
            counted.collectives += self._collectives() - collectives
            known = counted.visits is not None and self._uncounted == uncounted
            counted.visits = (counted.visits or 0) + self._visits - visits if known else None

    def _wrap(self, stack: ExitStack, owner: Any, method: str, phase: str, applies: Callable[[], bool]) -> None:
        inner = getattr(owner, method, None)
        if inner is None:
            return

        @functools.wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            if not applies():
                return inner(*arguments, **named)
            with self.region(phase):
                if phase == CLEAR:
                    self._visits += self._cleared()
                ours = phase == RELEASE and hasattr(self._optimizer, "release_visits")
                if ours:
                    self._optimizer.release_visits = 0
                result = inner(*arguments, **named)
                if phase == RELEASE:
                    looked_at = self._optimizer.release_visits if ours else 0
                    self._visits += looked_at
                    self._uncounted += not looked_at
                return result

        stack.enter_context(substituted(owner, method, call))

    def _apart(self) -> bool:
        """Whether sub-groups are updated one by one."""
        return not getattr(self._optimizer, "_merging", False)

    def _cleared(self) -> int:
        """Parameters that a clear visits now: those of the sub-group in preparation, where it is scoped, or all."""
        groups, scope = self._optimizer.fp16_groups, getattr(self._optimizer, "_clear_scope", None)
        return sum(map(len, groups)) if scope is None else len(groups[scope])

    def _collectives(self) -> int:
        return 0 if self._backend is None else self._backend.count


def _always() -> bool:
    return True
