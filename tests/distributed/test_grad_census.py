# SPDX-License-Identifier: Apache-2.0
"""The census: it counts what upstream really visits, and nothing when nobody asked."""

from typing import Any

import pytest

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.config import Zero3Options
from lightning_zero3.metrics import names
from tests.engines import build, micro_step
from tests.fits import Pairs, Regression, fit


def counts(scoped: bool) -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.capabilities.fixes import GRAD_CLEAR

    # The merged step prepares no sub-groups, so it has no clear to scope.
    engine = build(options=Zero3Options(scoped_grad_clear=scoped, batch_optimizer_step=False))
    optimizer = engine.optimizer
    micro_step(engine, 0)
    before = optimizer.grad_clear_census
    optimizer.start_grad_clear_census()
    seen = []
    for step in range(1, 4):
        micro_step(engine, step)
        seen.append((optimizer.grad_clear_census.visits, optimizer.grad_clear_census.live))
    return {
        "before": before,
        "seen": seen,
        "seconds": optimizer.grad_clear_census.seconds,
        "sub_groups": len(optimizer.fp16_groups),
        "parameters": sum(map(len, optimizer.fp16_groups)),
        "clears_once": GRAD_CLEAR.mended(DeepSpeedZeroOptimizer_Stage3),
    }


@pytest.mark.parametrize("scoped", [True, False])
def test_visits_are_parameters_with_the_clear_on_and_upstreams_with_it_off(ranks, scoped):
    seen = ranks(1).run(counts, scoped)[0]
    assert seen["before"] is None
    assert seen["sub_groups"] > 2
    times = 1 if scoped or seen["clears_once"] else seen["sub_groups"]
    # DeepSpeed has let go of every gradient in backward on this device, so no visit finds one.
    assert seen["seen"] == [(times * seen["parameters"], 0)] * 3
    assert seen["seconds"] > 0


def live_ones() -> tuple[int, int]:
    import torch

    class Gradient(torch.Tensor):
        def record_stream(self, stream: Any) -> None:
            pass

    engine = build()
    optimizer = engine.optimizer
    optimizer.start_grad_clear_census()
    micro_step(engine, 0)
    given = [p for group in optimizer.fp16_groups for p in group][:3]
    optimizer._in_step = True
    for parameter in given:
        parameter.grad = torch.zeros_like(parameter.data).as_subclass(Gradient)
    optimizer.zero_grad()
    optimizer._in_step = False
    return optimizer.grad_clear_census.live, len(given)


def test_live_gradients_are_counted(ranks):
    live, given = ranks(1).run(live_ones)[0]
    assert live == given == 3


def logged(census: bool) -> dict[str, float]:
    monitor = Zero3Monitor(grad_clear_census=census)
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(), callbacks=[monitor], steps=2)
    assert (trainer.strategy.model.optimizer.grad_clear_census is not None) is census
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_the_monitor_logs_it_when_asked(ranks):
    metrics = ranks(1).run(logged, True)[0]
    assert metrics[names.GRAD_CLEAR_VISITS] == 6
    assert metrics[names.GRAD_CLEAR_LIVE] == 0
    assert metrics[names.GRAD_CLEAR_US_PER_VISIT] > 0
    assert not [name for name in ranks(1).run(logged, False)[0] if "grad_clear" in name]


def collectives_logged(census: bool) -> dict[str, float]:
    monitor = Zero3Monitor(collective_census=census)
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(), callbacks=[monitor], steps=2)
    assert (trainer.strategy.model.optimizer.step_collectives is not None) is census
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_collectives_are_logged_only_when_asked_for(ranks):
    for values in ranks(2).run(collectives_logged, True):
        # One reduction of the norms, one gather of the persistent parameters.
        assert values[names.COLLECTIVES_PER_STEP] == 2
    for values in ranks(1).run(collectives_logged, False):
        assert names.COLLECTIVES_PER_STEP not in values
