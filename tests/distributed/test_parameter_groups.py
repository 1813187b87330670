# SPDX-License-Identifier: Apache-2.0
"""A user's parameter groups under AutoEP, which replaces parameters after ``configure_optimizers`` has taken them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.step_arms import one_group_per_expert_tensor
from lightning_zero3 import Zero3FastStrategy
from tests.fits import Language, Sentences, fit, optimizer_of
from tests.models import build_glm, tiny_glm

# So different that a parameter in the wrong group shows in the losses.
SETTINGS = {"experts": (2e-2, 4.0), "vectors": (5e-3, 0.0), "matrices": (1e-3, 1.0)}


def kind(name: str, parameter: torch.Tensor) -> str:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return "experts" if ".experts." in name else "vectors" if len(shape) < 2 else "matrices"


class Grouped(Language):
    """Three groups, each with a learning rate, a schedule and a weight decay of its own."""

    def __init__(self, *, in_partitions: bool, left_out: str | None = None) -> None:
        super().__init__(None if in_partitions else build_glm(tiny_glm(), seed=5))
        self.left_out = left_out

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            torch.manual_seed(5)
            self.some_odd_name = AutoModelForCausalLM.from_config(tiny_glm())

    def configure_optimizers(self) -> Any:
        found: dict[str, list[torch.nn.Parameter]] = {group: [] for group in SETTINGS if group != self.left_out}
        for name, parameter in self.named_parameters():
            if kind(name, parameter) in found:
                found[kind(name, parameter)].append(parameter)
        optimizer = torch.optim.AdamW(
            {"params": found[group], "lr": SETTINGS[group][0], "weight_decay": SETTINGS[group][1]} for group in found
        )
        schedules = [lambda step, i=i: 1 / (1 + step * i) for i in range(len(found))]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(size: int | None, in_partitions: bool, left_out: str | None = None) -> dict[str, Any]:
    module = Grouped(in_partitions=in_partitions, left_out=left_out)
    trainer = fit(module, Sentences(64), Zero3FastStrategy(expert_parallel_size=size), steps=6)
    optimizer = optimizer_of(trainer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    decays = {}
    for index, sub_group in enumerate(optimizer.fp16_groups):
        settings = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[index]]
        decays.update({names[id(parameter)]: settings["weight_decay"] for parameter in sub_group})
    wrong = {
        name: decays.get(name)
        for name, parameter in module.named_parameters()
        if decays.get(name) != (None if kind(name, parameter) == left_out else SETTINGS[kind(name, parameter)][1])
    }
    rates = [group["lr"] for group in optimizer.optimizer.param_groups]
    return {"losses": module.losses, "wrong": wrong, "decays": decays, "rates": rates}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("in_partitions", [False, True])
def test_replaced_parameters_keep_the_groups_of_those_they_replace(ranks, in_partitions, world_size):
    plain = ranks(world_size).run(trained, None, in_partitions)
    with_experts_shared = ranks(world_size).run(trained, world_size, in_partitions)
    for expected, seen in zip(plain, with_experts_shared, strict=True):
        assert expected["wrong"] == seen["wrong"] == {}
        assert any(name.endswith("experts.w1") for name in seen["decays"])
        assert seen["losses"] == pytest.approx(expected["losses"], abs=2e-5)
        assert set(seen["rates"]) == set(expected["rates"])


def test_experts_that_the_optimizer_leaves_out_stay_untrained(ranks):
    plain = ranks(2).run(trained, None, False, "experts")
    shared = ranks(2).run(trained, 2, False, "experts")
    for expected, seen in zip(plain, shared, strict=True):
        assert expected["wrong"] == seen["wrong"] == {}
        assert seen["losses"] == pytest.approx(expected["losses"], abs=2e-5)


class OneGroup(Grouped):
    """One learning rate for all, of an optimizer of the user's own."""

    def __init__(self, *, in_partitions: bool) -> None:
        super().__init__(in_partitions=in_partitions)
        if not in_partitions:
            self.some_odd_name = build_glm(tiny_glm(num_hidden_layers=3), seed=5)

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self.some_odd_name = AutoModelForCausalLM.from_config(tiny_glm(num_hidden_layers=3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def sub_groups(named_in_config: bool, in_partitions: bool, zero: dict[str, Any]) -> tuple[int, int]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, **zero}}
    if named_in_config:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    module = OneGroup(in_partitions=in_partitions)
    # At full width, an expert tensor is as large as DeepSpeed lets a group become.
    with one_group_per_expert_tensor():
        trainer = fit(module, Sentences(64), Zero3FastStrategy(config, expert_parallel_size=2), steps=1)
    return len(optimizer_of(trainer).fp16_groups), sum(1 for _ in module.parameters())


@pytest.mark.parametrize(
    ("named_in_config", "in_partitions", "zero", "expected"),
    [
        # 3 expert tensors in each MoE layer, and the rest in one or two: 3 × 45 + 2 = 137 for GLM-4.5-Air.
        (True, True, {}, 3 * 2 + 2),
        (True, False, {}, 3 * 2 + 1),
        (False, True, {}, 3),
        (False, False, {}, 2),
        (False, True, {"sub_group_size": 1}, None),
    ],
)
def test_what_the_number_of_sub_groups_is_made_of(ranks, named_in_config, in_partitions, zero, expected):
    for groups, parameters in ranks(2).run(sub_groups, named_in_config, in_partitions, zero):
        assert groups == (expected or parameters)
