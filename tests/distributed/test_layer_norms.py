# SPDX-License-Identifier: Apache-2.0
"""Gradient norms per layer in Lightning's hooks: those of a plain Trainer, before clipping."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero3 import Zero3FastStrategy, grad_norms
from tests.engines import build, micro_step, norm_of
from tests.fits import QUIET, Language, Pairs, Regression, Sentences, fit, optimizer_of
from tests.models import build_glm, tiny_glm

OPTIONS = {**QUIET, "use_distributed_sampler": False}


class Watched(Regression):
    """Records norms in every hook; one layer isn't used in every second step, one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = torch.nn.Linear(13, 7)
        self.never = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.seen: list[tuple[str, dict[str, float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x) + (self.sometimes(x) if self.global_step % 2 == 0 else 0)
        return ((out - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def note(self, hook: str) -> None:
        for norm_type in (2, 1.5, "inf"):
            self.seen.append((hook, {k: float(v) for k, v in grad_norms(self, norm_type).items()}))
        self.seen.append((hook, {k: float(v) for k, v in grad_norms(self.net[0], 2).items()}))

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, Zero3FastStrategy):
            self.note("on_before_zero_grad")


def fitted(strategy: Any, accumulate: int) -> Any:
    world = torch.distributed.get_world_size()
    plain = strategy == "auto"
    trainer = pl.Trainer(
        strategy=strategy,
        devices=1 if plain else world,
        max_steps=3,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05,
        **OPTIONS,
    )
    data = Pairs(length=2 * world * 3 * accumulate)
    sampler = None if plain else DistributedSampler(data, shuffle=False)
    module = Watched()
    trainer.fit(module, DataLoader(data, batch_size=2 * world if plain else 2, sampler=sampler))
    return trainer


def against_plain(accumulate: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 100, "stage3_param_persistence_threshold": 20}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    ours = fitted(Zero3FastStrategy({"zero_optimization": zero}), accumulate)
    plain = fitted("auto", accumulate)
    clear = [norms for hook, norms in ours.lightning_module.seen if hook == "on_before_zero_grad"]
    return {
        "ours": [(hook, norms) for hook, norms in ours.lightning_module.seen if hook != "on_before_zero_grad"],
        "plain": plain.lightning_module.seen,
        "after the step": clear,
        "type": type(optimizer_of(ours)).__name__,
    }


@pytest.mark.parametrize(
    ("world_size", "accumulate", "offload"), [(1, 1, False), (1, 2, True), (2, 1, False), (2, 2, False), (2, 2, True)]
)
def test_norms_in_hooks_are_a_plain_trainers(ranks, world_size, accumulate, offload):
    for seen in ranks(world_size).run(against_plain, accumulate, offload):
        assert seen["type"] == "FastStage3Optimizer"
        assert len(seen["ours"]) == len(seen["plain"]) == 4 * 3 * (accumulate + 1)
        for (hook, ours), (same_hook, plain) in zip(seen["ours"], seen["plain"], strict=True):
            assert hook == same_hook
            assert ours == pytest.approx(plain, rel=2e-6)
            assert plain
        assert any("grad_2.0_norm/sometimes.bias" not in norms for _, norms in seen["plain"])
        assert seen["plain"][0][1]["grad_2.0_norm_total"] > 0.05
        assert not any(seen["after the step"])


def other_cases() -> dict[str, Any]:
    """A loss scale, the engine's own norm, and gradients that a plain module holds."""
    engine = build()
    engine.optimizer.override_loss_scale(64.0)
    taken = {}
    pre_step = engine.optimizer._pre_step

    collectives = torch.distributed.all_reduce
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return collectives(*arguments, **options)

    def noted(*arguments: Any) -> Any:
        torch.distributed.all_reduce = counted
        taken.update(grad_norms(engine.module))
        torch.distributed.all_reduce = collectives
        return pre_step(*arguments)

    engine.optimizer._pre_step = noted
    micro_step(engine, 0)
    scaled, reported = float(taken["grad_2.0_norm_total"]), norm_of(engine)
    del engine.optimizer._pre_step
    engine.destroy()
    plain = torch.nn.Linear(3, 2)
    plain(torch.ones(1, 3)).sum().backward()
    for norm_type in (0, -1, "nan"):
        with pytest.raises(ValueError, match="a positive number or 'inf'"):
            grad_norms(plain, norm_type)
    same = grad_norms(plain) == grad_norm(plain, 2)
    return {"ours": scaled, "engine's": reported, "plain": same, "collectives": len(calls)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_scale_engines_norm_and_plain_modules(ranks, world_size):
    for seen in ranks(world_size).run(other_cases):
        assert seen["ours"] == pytest.approx(seen["engine's"], rel=1e-6)
        assert seen["collectives"] == 1
        assert seen["plain"]


class Experts(Language):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = {name: float(norm) for name, norm in grad_norms(self).items()}


def experts(size: int | None) -> tuple[dict[str, float], float]:
    config = tiny_glm(n_routed_experts=4)
    module = Experts(build_glm(config, seed=5))
    trainer = fit(module, Sentences(config.vocab_size), Zero3FastStrategy(expert_parallel_size=size), steps=1)
    return module.norms, norm_of(trainer.strategy.model)


def test_norms_with_experts_spread_over_ranks(ranks):
    without = ranks(2).run(experts, None)
    for size in (1, 2):
        seen = ranks(2).run(experts, size)
        assert seen[0] == seen[1]
        for (ours, reported), (reference, _) in zip(seen, without, strict=True):
            total = "grad_2.0_norm_total"
            assert ours[total] == pytest.approx(reported, rel=1e-6)
            assert ours[total] == pytest.approx(reference[total], rel=1e-5)
            same_names = ours.keys() & reference.keys()
            assert len(same_names) > 20
            assert {k: ours[k] for k in same_names} == pytest.approx({k: reference[k] for k in same_names}, rel=1e-4)
            assert sum(".experts.w" in name for name in ours) == 3
