# SPDX-License-Identifier: Apache-2.0
"""Parameters that a step doesn't reach: the gradient is zero, as in stages 0 to 2, and never an older step's."""

import itertools
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy, Zero3Options
from tests.engines import PRECISIONS, build
from tests.fits import Pairs, Regression, fit

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
}


class Branches(torch.nn.Module):
    """Two layers side by side, of which a micro-step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(13, 7)
        self.second = torch.nn.Linear(13, 7)

    def forward(self, batch: Any, used: str) -> torch.Tensor:
        x, y = batch
        out = sum(getattr(self, name)(x) for name in used.split())
        return ((out.float() - y.float()) ** 2).mean()


def batch_of(step: int, dtype: torch.dtype) -> Any:
    data, rank, world = Pairs(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    start = 2 * ((step * world + rank) % 30)
    return data.x[start : start + 2].to(dtype), data.y[start : start + 2]


# Which branches each micro-step uses, by steps.
SCHEDULES = {
    "unused now and then": [["first second"], ["first"], ["second"], ["first second"], ["first"], ["first"]],
    "unused at first": [["first"], ["first"], ["first second"], ["first"]],
    "accumulated": [
        ["first second", "first second"],
        ["first", "second"],
        ["second", "first"],
        ["first", "first"],
        ["first", "first second"],
        ["second", "second"],
    ],
}


def reference(optimizer: str, schedule: list[list[str]]) -> list[torch.Tensor]:
    """The same with plain torch, where missing gradients are set to zero, over all ranks' batches."""
    model, world = Branches(), torch.distributed.get_world_size()
    built = OPTIMIZERS[optimizer](model.parameters())
    index = 0
    for micro_steps in schedule:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for used in micro_steps:
            loss = model(batch_of(index, torch.float32), used) / len(micro_steps)
            loss.backward()
            index += 1
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        built.step()
    return [p.detach() for p in model.parameters()]


def trained(engine: Any, schedule: list[list[str]]) -> list[torch.Tensor]:
    import deepspeed

    index = 0
    for micro_steps in schedule:
        for used in micro_steps:
            loss = engine(batch_of(index, next(engine.module.parameters()).dtype), used)
            engine.backward(loss)
            engine.step()
            index += 1
    return [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def against_plain_torch(optimizer: str, name: str, offload: bool) -> float:
    schedule = SCHEDULES[name]
    model = Branches()
    config: dict[str, Any] = {"gradient_accumulation_steps": len(schedule[0]), "gradient_clipping": 0.0}
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = build(model, optimizer=OPTIMIZERS[optimizer](model.parameters()), sub_group_size=40, zero=zero, **config)
    worst = 0.0
    for ours, plain in zip(trained(engine, schedule), reference(optimizer, schedule), strict=True):
        worst = max(worst, float(((ours - plain).abs() / (plain.abs() + 1e-3)).max()))
    return worst


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fit_with_unused_parameters_is_plain_torchs(ranks, world_size, optimizer, schedule, offload):
    for worst in ranks(world_size).run(against_plain_torch, optimizer, schedule, offload):
        assert worst < 1e-4


def stands_still(precision: str) -> dict[str, bool]:
    import deepspeed

    moved = {}
    for name, stock in (("ours", False), ("stock", True)):
        model = Branches()
        engine = build(model, optimizer=OPTIMIZERS["SGD"](model.parameters()), stock=stock, **PRECISIONS[precision])
        before = None
        for used in ("first second", "first"):
            before = deepspeed.utils.safe_get_full_fp32_param(engine.module.second.weight).clone()
            engine.backward(engine(batch_of(0, next(engine.module.parameters()).dtype), used))
            engine.step()
        after = deepspeed.utils.safe_get_full_fp32_param(engine.module.second.weight)
        moved[name] = not torch.equal(before, after)
    return moved


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_plain_sgd_an_unused_parameter_does_not_move(ranks, precision):
    for moved in ranks(2).run(stands_still, precision):
        assert not moved["ours"]
        if not moved["stock"]:
            pytest.skip("upstream is mended")


def cleared_in_between() -> None:
    """A clear between two backwards starts the step anew, for parameters that only the first one used too."""
    import deepspeed

    model = Branches()
    engine = build(model, optimizer=OPTIMIZERS["SGD"](model.parameters()))
    engine.backward(engine(batch_of(0, torch.float32), "first second"))
    engine.optimizer.zero_grad()
    before = deepspeed.utils.safe_get_full_fp32_param(model.second.weight).clone()
    engine.backward(engine(batch_of(1, torch.float32), "first"))
    engine.step()
    assert torch.equal(before, deepspeed.utils.safe_get_full_fp32_param(model.second.weight))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_clear_in_between_forgets_what_was_reduced(ranks, world_size):
    ranks(world_size).run(cleared_in_between)


class Thawing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].requires_grad_(batch_idx >= 2)


class FreezingLater(Regression):
    """The remedy of the error: all parameters are there from the start."""

    def on_train_start(self) -> None:
        self.net[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].requires_grad_(batch_idx >= 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def unfrozen() -> tuple[str, list[bool], str]:
    import deepspeed

    from lightning_zero3.optimizer.missing_gradients import UnfrozenParameterError

    with pytest.raises(UnfrozenParameterError) as caught:
        fit(Thawing(), Pairs(), "zero3_fast")
    seen: list[torch.Tensor] = []

    class Watched(FreezingLater):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(deepspeed.utils.safe_get_full_fp32_param(self.net[2].weight.requires_grad_()).clone())

    fit(Watched(), Pairs(), "zero3_fast")
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    stock = fit(Thawing(), Pairs(), Zero3FastStrategy(stock_semantics=True))
    return str(caught.value), moved, stock.state.status.value


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_unfrozen_later_is_refused_and_one_frozen_later_is_trained(ranks, world_size):
    for message, moved, status in ranks(world_size).run(unfrozen):
        assert "net.2.weight and 1 more" in message
        assert "requires_grad=True" in message
        # Steps 1 and 2 leave it where it is, 3 to 5 train it.
        assert moved == [False, True, True, True]
        assert status == "finished"


def without_the_correction() -> bool:
    model = Branches()
    options = Zero3Options(stock_semantics=True)
    engine = build(model, optimizer=OPTIMIZERS["SGD"](model.parameters()), options=options)
    upstream = Branches()
    stock = build(upstream, optimizer=OPTIMIZERS["SGD"](upstream.parameters()), stock=True)
    schedule = SCHEDULES["unused now and then"]
    return all(torch.equal(a, b) for a, b in zip(trained(engine, schedule), trained(stock, schedule), strict=True))


def test_with_stock_semantics_it_is_stocks(ranks):
    assert ranks(2).run(without_the_correction) == [True, True]
