# SPDX-License-Identifier: Apache-2.0
"""The parts that make upstream's ``step`` cheap, together; each has a switch and a file of its own."""

from __future__ import annotations

from lightning_zero3.optimizer.batched_step import BatchOptimizerStep
from lightning_zero3.optimizer.collective_census import CountCollectives
from lightning_zero3.optimizer.grad_norm import CoalesceGradNorms
from lightning_zero3.optimizer.persistent_gather import CoalescePersistentGather
from lightning_zero3.optimizer.release import SkipRedundantRelease


class FastStep(CountCollectives, SkipRedundantRelease, CoalesceGradNorms, BatchOptimizerStep, CoalescePersistentGather):
    """Mixin over a Stage-3 optimizer: release, norms, update and gather, in the order in which ``step`` comes to them.

    And a count of the collectives that are left.
    """
