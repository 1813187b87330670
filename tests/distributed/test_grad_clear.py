# SPDX-License-Identifier: Apache-2.0
"""The scoped gradient clear: one visit per parameter and step, whatever the number of sub-groups and the release.

Releases up to 0.19.7 clear per sub-group, 0.19.8 once per step. Both behaviours are put on top of whatever is
installed, so that both are tested everywhere. Visits are counted where they happen, not timed.
"""

import argparse
import copy
from typing import Any

import pytest
import torch

from lightning_zero3.config import Zero3Options
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.substitution import substituted
from tests.engines import Trainable
from tests.fits import Pairs, assert_equal_bits, tensors_of


class CountedList(list):
    """A list that counts how often one of its elements is visited."""

    visits = 0

    def __iter__(self):
        for element in super().__iter__():
            CountedList.visits += 1
            yield element


class Gradient(torch.Tensor):
    """A live gradient. Upstream records its stream before letting go of it; a CPU tensor has none and would raise."""

    def record_stream(self, stream: Any) -> None:
        pass


def give_gradients(groups: list[list[torch.nn.Parameter]]) -> None:
    for group in groups:
        for parameter in group:
            parameter.grad = torch.zeros_like(parameter.data).as_subclass(Gradient)


def optimizer_class(*, scoped: bool, per_sub_group: bool, ours: bool) -> type:
    """Upstream's class with counted visits, clearing as the named release does, with or without our part on top."""
    from deepspeed.runtime.zero import stage3

    from lightning_zero3.optimizer.grad_clear import ScopedGradClear

    class Counted(stage3.DeepSpeedZeroOptimizer_Stage3):
        def zero_grad(self, set_to_none: bool = True) -> None:
            groups = self.fp16_groups
            self.fp16_groups = [CountedList(group) for group in groups]
            try:
                super().zero_grad(set_to_none)
            finally:
                self.fp16_groups = groups

    class PerSubGroup(Counted):
        def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)
            self.zero_grad(set_to_none=True)

    base = PerSubGroup if per_sub_group else Counted
    if not ours:
        return base
    switches = Switches.from_options(Zero3Options(scoped_grad_clear=scoped))
    return type("Ours", (ScopedGradClear, base), {"switches": switches})


def build(optimizer: type, sub_group_size: int) -> Any:
    import deepspeed
    from deepspeed.runtime.zero import stage3

    model = Trainable()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_size,
            "stage3_param_persistence_threshold": 0,
        },
    }
    with substituted(stage3, "DeepSpeedZeroOptimizer_Stage3", optimizer):
        engine, built, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=0), model=model, config=copy.deepcopy(config)
        )
    assert type(built) is optimizer
    return engine


def forward_backward(engine: Any, step: int) -> None:
    data = Pairs()
    engine.backward(engine((data.x[2 * step : 2 * step + 2], data.y[2 * step : 2 * step + 2]), step))


def visits_of_a_step(scoped: bool, per_sub_group: bool, ours: bool, sub_group_size: int) -> dict[str, int]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.capabilities.fixes import GRAD_CLEAR

    engine = build(optimizer_class(scoped=scoped, per_sub_group=per_sub_group, ours=ours), sub_group_size)
    for step in range(2):
        forward_backward(engine, step)
        engine.step()
    forward_backward(engine, 2)
    # Whatever is still alive after the step hasn't been cleared by it.
    give_gradients(engine.optimizer.fp16_groups)
    CountedList.visits = 0
    engine.optimizer.step()
    groups = engine.optimizer.fp16_groups
    return {
        "upstream_clears_once": GRAD_CLEAR.mended(DeepSpeedZeroOptimizer_Stage3),
        "sub_groups": len(groups),
        "parameters": sum(map(len, groups)),
        "visits": CountedList.visits,
        "left": sum(parameter.grad is not None for group in groups for parameter in group),
    }


@pytest.mark.parametrize("sub_group_size", [100, 10_000])
def test_each_parameter_is_visited_once_where_upstream_clears_per_sub_group(ranks, sub_group_size):
    seen = ranks(1).run(visits_of_a_step, True, True, True, sub_group_size)[0]
    # Twice, because the installed release's own clear (per sub-group or per step) stands beside the one put on top.
    assert seen["visits"] == 2 * seen["parameters"]
    assert seen["left"] == 0
    assert seen["sub_groups"] == (1 if sub_group_size > 1000 else 4)


@pytest.mark.parametrize("ours", [True, False])
def test_without_the_switch_visits_are_sub_groups_times_parameters(ranks, ours):
    seen = ranks(1).run(visits_of_a_step, False, True, ours, 100)[0]
    own = seen["parameters"] if seen["upstream_clears_once"] else seen["sub_groups"] * seen["parameters"]
    assert seen["visits"] == seen["sub_groups"] * seen["parameters"] + own
    assert seen["left"] == 0


def test_the_installed_release_visits_each_parameter_once_with_our_optimizer(ranks):
    seen = ranks(1).run(visits_of_a_step, True, False, True, 100)[0]
    assert seen["sub_groups"] == 4
    assert seen["visits"] == seen["parameters"]
    assert seen["left"] == 0


def scope_of_a_clear() -> dict[str, Any]:
    optimizer = build(optimizer_class(scoped=True, per_sub_group=True, ours=True), 100).optimizer
    groups = optimizer.fp16_groups
    give_gradients(groups)
    optimizer.micro_step_id, optimizer._epilogue_ran_this_backward = 5, True
    optimizer._clear_scope = 2
    optimizer.zero_grad()
    optimizer._clear_scope = None
    cleared = [{parameter.grad is None for parameter in group} for group in groups]
    resets = (optimizer.micro_step_id, optimizer._epilogue_ran_this_backward)
    for parameter in groups[1]:
        parameter.grad = torch.ones_like(parameter.data)
    optimizer._clear_scope = 1
    optimizer.zero_grad(set_to_none=False)
    optimizer._clear_scope = None
    kept = {parameter.grad is not None for parameter in groups[1]}
    for parameter in groups[1]:
        parameter.grad = None
    optimizer.zero_grad()
    everything = {parameter.grad is None for group in groups for parameter in group}
    return {
        "cleared": cleared,
        "resets": resets,
        "everything": everything,
        "kept": kept,
        "same": optimizer.fp16_groups is groups,
    }


def test_a_scoped_clear_makes_both_resets_and_touches_its_sub_group_alone(ranks):
    seen = ranks(1).run(scope_of_a_clear)[0]
    assert seen["cleared"] == [{index == 2} for index in range(4)]
    assert seen["resets"] == (0, False)
    assert seen["everything"] == {True}
    # What upstream's argument says is passed on: zeroed in place, not let go of.
    assert seen["kept"] == {True}
    assert seen["same"]


def parity() -> None:
    runs = []
    for scoped, ours in ((True, True), (False, True), (False, False)):
        engine = build(optimizer_class(scoped=scoped, per_sub_group=True, ours=ours), 100)
        for step in range(5):
            forward_backward(engine, step)
            engine.step()
        runs.append((engine.module.losses, tensors_of(engine.optimizer)))
    for losses, tensors in runs[1:]:
        assert losses == runs[0][0]
        assert_equal_bits(tensors, runs[0][1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_five_steps_are_bit_identical_with_and_without(ranks, world_size):
    ranks(world_size).run(parity)
