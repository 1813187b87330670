# SPDX-License-Identifier: Apache-2.0
"""The strategy's time-out holds for every process group that a fit makes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_zero3 import group_timeouts
from tests.recipes.recipes import observed

CPU = torch.device("cpu")


def of(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def of_groups_of_our_own() -> dict[str, Any]:
    world = torch.distributed.group.WORLD
    first = torch.distributed.new_group([0, 1])
    before, defaults = group_timeouts.groups(), of(world)
    second, alone = torch.distributed.new_group([0, 1]), torch.distributed.new_group([0])
    group_timeouts.set_for_new(before, default_pg_timeout)
    untouched = of(second)
    group_timeouts.set_for_new(before, timedelta(seconds=123))
    member = torch.distributed.get_rank() == 0
    seen = {
        "untouched": untouched == default_pg_timeout,
        "second": of(second),
        "alone": of(alone) if member else timedelta(seconds=123),
        "world": of(world) == defaults,
        "first": of(first) == default_pg_timeout,
    }
    for group in (first, second, *([alone] if member else [])):
        torch.distributed.destroy_process_group(group)
    return seen


def test_new_groups_get_it_and_others_keep_theirs(ranks):
    for seen in ranks(2).run(of_groups_of_our_own):
        assert seen["second"] == seen["alone"] == timedelta(seconds=123)
        assert all(seen[name] for name in ("untouched", "world", "first"))


def what_a_fit_asks_for() -> tuple[bool, Any, list[bool]]:
    groups_of_deepspeed: list[Any] = []
    original = group_timeouts.set_for_new

    def watched(before: list[Any], timeout: Any) -> None:
        # DeepSpeed keeps groups for the next engine of the process, so they are taken for new ones here.
        world_only = [torch.distributed.group.WORLD]
        groups_of_deepspeed.extend(group for group in group_timeouts.groups() if group not in world_only)
        original(world_only, timeout)
        asked.append((torch.distributed.group.WORLD in before, timeout))

    asked: list[Any] = []
    with mock.patch.object(group_timeouts, "set_for_new", watched):
        observed("glm45air", ("--layers", "2", "--timeout_seconds", "321", "--max_steps", "1"))
    seen = [of(group) == timedelta(seconds=321) for group in groups_of_deepspeed]
    for group in groups_of_deepspeed:
        torch.distributed.distributed_c10d._set_pg_timeout(default_pg_timeout, group)
    return (*asked[0], seen)


def test_a_recipes_option_reaches_deepspeeds_groups(ranks):
    for world_was_there, timeout, seen in ranks(2).run(what_a_fit_asks_for):
        assert world_was_there
        assert timeout == timedelta(seconds=321)
        assert len(seen) >= 2
        assert all(seen)
