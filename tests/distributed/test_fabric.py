# SPDX-License-Identifier: Apache-2.0
"""Fabric(strategy="zero3_fast"): the bits of a Trainer's fit, and everything else that a user's own loop does."""

import contextlib
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastFabricStrategy, Zero3FastStrategy
from tests.fabric_loops import train
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build, tiny
from tests.ranks import ROOT

SMALL: dict[str, Any] = {"zero_optimization": {"stage": 3, "sub_group_size": 100}}
AUTOCAST = {**SMALL, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
MOE: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}


class _Scheduled:
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ScheduledRegression(_Scheduled, Regression):
    """Its learning rate moves at each step."""


class ScheduledLanguage(_Scheduled, Language):
    """Likewise."""


def module_and_data(family: str | None) -> tuple[Any, Any]:
    if family is None:
        return ScheduledRegression(), Pairs()
    return ScheduledLanguage(build(tiny(family), seed=1)), Sentences(64)


def assert_same_bits(
    config: dict[str, Any],
    family: str | None = None,
    *,
    precision: str = "32-true",
    accumulate: int = 1,
    clip: float | None = None,
    engine_counts: bool = False,
    **options: Any,
) -> None:
    """Train the same under a Trainer and under Fabric, and compare losses, weights, masters and moments."""
    theirs, data = module_and_data(family)
    trainer = fit(
        theirs,
        data,
        Zero3FastStrategy(config, **options),
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    expected = tensors_of(optimizer_of(trainer))
    rates = [group["lr"] for group in optimizer_of(trainer).param_groups]
    ours, _ = module_and_data(family)
    if engine_counts:
        config = {**config, "gradient_accumulation_steps": accumulate}
    strategy = Zero3FastFabricStrategy(config, **options)
    fabric, _, optimizer = train(ours, data, strategy, precision=precision, accumulate=accumulate, clip=clip)
    assert ours.losses == theirs.losses, (ours.losses, theirs.losses)
    assert_equal_bits(tensors_of(fabric.strategy.model.optimizer), expected)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert rates[0] < 0.5e-2
    assert fabric.strategy.model.global_steps == trainer.strategy.model.global_steps == trainer.global_step


def same_bits_of_a_regression() -> None:
    assert_same_bits(SMALL, accumulate=3, clip=0.05)
    assert_same_bits(SMALL, accumulate=2, clip=0.05, engine_counts=True)
    assert_same_bits(SMALL, precision="bf16-mixed", accumulate=3, clip=0.05)
    assert_same_bits(SMALL, precision="bf16-true", accumulate=2)
    assert_same_bits(AUTOCAST, accumulate=2)
    assert_same_bits({"zero_optimization": {**SMALL["zero_optimization"], "offload_optimizer": {"device": "cpu"}}})


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_steps_as_a_trainers(ranks, world_size):
    ranks(world_size).run(same_bits_of_a_regression)


def the_documentations_example(folder: str) -> None:
    page = (ROOT / "docs" / "fabric.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    with contextlib.chdir(folder):
        exec(compile(code, "docs/fabric.md", "exec"), {})


@pytest.mark.skipif(not hasattr(contextlib, "chdir"), reason="it writes into the current folder")
def test_the_documentations_example_runs(ranks, tmp_path):
    ranks(1).run(the_documentations_example, str(tmp_path))
    assert (tmp_path / "checkpoint" / "latest").is_file()


def same_bits_of_experts() -> None:
    options = {"expert_parallel_size": 2, "router_bias_update_speed": 0.01}
    assert_same_bits(MOE, "glm", precision="bf16-mixed", accumulate=2, clip=0.05, **options)
    assert_same_bits(MOE, "mixtral", expert_parallel_size=2, tensor_parallel_size=2)


def test_the_same_steps_as_a_trainers_with_expert_and_tensor_parallelism(ranks):
    ranks(2).run(same_bits_of_experts)
