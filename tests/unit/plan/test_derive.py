# SPDX-License-Identifier: Apache-2.0
"""Structures by arithmetic equal those that DeepSpeed's own set-up gives."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from typing import Any

import pytest

from lightning_zero3.config import SetupError
from lightning_zero3.plan.child import Found, Job, find_all
from lightning_zero3.plan.derive import derive
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import Structure
from tests.models import tiny

# Each has its own rules for groups; the first is what the others of its line are derived from.
BASE = {"devices": 4, "expert_parallel_size": 2, "sub_group_size": 5_000, "max_group_size": 3_000}
LINES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "groups of experts cut": (
        BASE,
        [
            {"nodes": 2, "bf16_masters": True},
            {"devices": 1, "expert_parallel_size": 1},
            {"expert_parallel_size": 4, "precision": "32-true"},
        ],
    ),
    "tensor parallel": (
        {**BASE, "tensor_parallel_size": 2, "max_group_size": None},
        [{"nodes": 4, "expert_parallel_size": 4, "bf16_masters": True}, {"devices": 2}],
    ),
}
MORE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a torch optimizer": ({**BASE, "optimizer": "torch"}, [{"devices": 8, "expert_parallel_size": 8}]),
    "no zero.Init": ({**BASE, "zero_init": False}, [{"devices": 8, "expert_parallel_size": 1}]),
    "no expert parallelism": ({**BASE, "expert_parallel_size": None}, [{"devices": 2, "precision": "32-true"}]),
}


@functools.cache
def built(slow: bool) -> dict[tuple[str, int], tuple[Setup, Structure]]:
    """Every structure, in one process."""
    setups: dict[tuple[str, int], Setup] = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny("glm").save_pretrained(folder)
        for name, (base, others) in (MORE if slow else LINES).items():
            first = Setup(model=folder, persistence_threshold=100, reduce_bucket_size=100_000, **base)
            setups |= {(name, k): replace(first, **other) for k, other in enumerate([{}, *others])}
        found = find_all([Job(setup=setup) for setup in setups.values()])
    assert all(isinstance(each, Found) for each in found), found
    return {
        key: (setup, each.structure)  # type: ignore[union-attr]
        for (key, setup), each in zip(setups.items(), found, strict=True)
    }


@pytest.mark.parametrize(
    ("slow", "name"),
    [*((False, name) for name in LINES), *(pytest.param(True, name, marks=pytest.mark.slow) for name in MORE)],
)
def test_derived_as_built(slow, name):
    _, others = (MORE if slow else LINES)[name]
    first, base = built(slow)[name, 0]
    assert derive(base, first, first) == base
    for number in range(1, 1 + len(others)):
        wanted, structure = built(slow)[name, number]
        derived = derive(base, first, wanted)
        assert derived == replace(structure, buffers_bytes=base.buffers_bytes), others[number - 1]


def test_what_cannot_be_derived_is_said():
    first, base = built(False)["groups of experts cut", 0]
    with pytest.raises(SetupError, match="another tensor_parallel_size can't be derived"):
        derive(base, first, replace(first, tensor_parallel_size=2))
    with pytest.raises(SetupError, match="from one without"):
        derive(base, first, replace(first, expert_parallel_size=None))
    with pytest.raises(SetupError, match="doesn't divide the 8 experts"):
        derive(base, first, replace(first, devices=16, expert_parallel_size=16))
    # Another rule than the known ones: no guess.
    with pytest.raises(SetupError, match="other rules"):
        derive(replace(base, sub_groups=base.sub_groups[:-1]), first, first)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 128])
def test_glm_at_its_true_size_on_other_worlds(nodes):
    first = Setup(recipe="glm45air", nodes=4, expert_parallel_size=8)
    wanted = replace(first, nodes=nodes)
    base, built_too = find_all([Job(setup=first), Job(setup=wanted)])
    assert isinstance(base, Found)
    assert isinstance(built_too, Found)
    assert derive(base.structure, first, wanted) == built_too.structure
