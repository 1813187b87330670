# SPDX-License-Identifier: Apache-2.0
"""Manual optimization gives a plain Trainer's numbers, however backward, zero_grad and step follow each other."""

from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from tests.distributed.reference import Watched, compared, run, weights
from tests.distributed.stock import StockOnCPU
from tests.distributed.test_accumulation import OFFLOADED, SMALL, assert_equal
from tests.fits import Regression


class Manual(Watched):
    """A ``training_step`` by its name in ``ORDERS``."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order = order

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ORDERS[self.order](self, batch, batch_idx)

    def loss(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return Regression.training_step(self, batch, batch_idx)

    def other_loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).abs().mean()

    def is_last_of(self, number: int, batch_idx: int) -> bool:
        return (batch_idx + 1) % number == 0 or self.trainer.is_last_batch


def accumulated(number: int) -> Any:
    def order(module: Manual, batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.loss(batch) / number)
        if module.is_last_of(number, batch_idx):
            module.optimizers().step()
            module.optimizers().zero_grad()
            module.lr_schedulers().step()

    return order


def cleared_in_the_middle(module: Manual, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    if batch_idx == 0:
        optimizer.zero_grad()  # before the first backward
    module.manual_backward(module.loss(batch))
    if batch_idx == 1:
        optimizer.zero_grad(set_to_none=True)  # the first two micro-batches' gradients are gone
    if module.trainer.is_last_batch:
        optimizer.step()
        optimizer.zero_grad()


def cleared_before_backward(module: Manual, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers() if batch_idx % 2 else module.trainer.optimizers[0]  # Lightning's wrapper or not
    loss = module.loss(batch)
    optimizer.zero_grad()  # between forward and backward
    module.manual_backward(loss)
    module.optimizers().step()


def two_backwards(module: Manual, batch: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()
    module.manual_backward(module.loss(batch))
    module.manual_backward(module.other_loss(batch))
    module.optimizers().step()


def two_forwards_then_two_backwards(module: Manual, batch: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()
    one, other = module.loss(batch), module.other_loss(batch)
    module.manual_backward(one)
    module.manual_backward(other)
    module.optimizers().step()


def two_backwards_and_two_batches(module: Manual, batch: Any, batch_idx: int) -> None:
    module.manual_backward(module.loss(batch) / 4)
    module.manual_backward(module.other_loss(batch) / 4)
    if module.is_last_of(2, batch_idx):
        module.optimizers().step()
        module.optimizers().zero_grad()


def two_backwards_first_cleared(module: Manual, batch: Any, batch_idx: int) -> None:
    module.manual_backward(module.loss(batch))
    module.optimizers().zero_grad()
    module.manual_backward(module.other_loss(batch))
    module.optimizers().step()
    module.optimizers().zero_grad()


def two_steps(module: Manual, batch: Any, batch_idx: int) -> None:
    for loss in (module.loss, module.other_loss):
        module.optimizers().zero_grad()
        module.manual_backward(loss(batch))
        module.optimizers().step()


def with_a_closure(module: Manual, batch: Any, batch_idx: int) -> None:
    def closure() -> torch.Tensor:
        module.optimizers().zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss)
        return loss

    module.optimizers().step(closure=closure)


def toggled(module: Manual, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    with optimizer.toggle_model(sync_grad=True):
        module.manual_backward(module.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def not_synchronized(module: Manual, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    last = module.is_last_of(2, batch_idx)
    with optimizer.toggle_model(sync_grad=last):
        module.manual_backward(module.loss(batch))
        if last:
            optimizer.step()
            optimizer.zero_grad()


def stepped_without_gradients(module: Manual, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    module.manual_backward(module.loss(batch))
    if batch_idx == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    if batch_idx == 2:
        optimizer.step()


ORDERS = {
    "one batch": accumulated(1),
    "two batches": accumulated(2),
    "three batches": accumulated(3),
    "cleared in the middle": cleared_in_the_middle,
    "cleared before backward": cleared_before_backward,
    "two backwards": two_backwards,
    "two forwards, then two backwards": two_forwards_then_two_backwards,
    "two backwards, two batches": two_backwards_and_two_batches,
    "two backwards, first cleared": two_backwards_first_cleared,
    "two steps": two_steps,
    "closure": with_a_closure,
    "toggled": toggled,
    "not synchronized": not_synchronized,
    "stepped without gradients": stepped_without_gradients,
}
# Two steps, or a step that updates nothing, within a batch: norms are recorded once a batch.
NORMS_DIFFER = {"two steps", "stepped without gradients"}


def against_plain(orders: list[str], zero: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        order: compared(*(run(s, Manual(order)) for s in (Zero3FastStrategy({"zero_optimization": zero}), "auto")))
        for order in orders
    }


@pytest.mark.parametrize("zero", [SMALL, OFFLOADED], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_backward_clear_and_step_equals_a_plain_trainers(ranks, world_size, order, zero):
    for answer in ranks(world_size).run(against_plain, [order], zero):
        seen = answer[order]
        if order in NORMS_DIFFER:
            seen["norms"] = ([], [])
        assert_equal(seen)


def clipped() -> dict[str, Any]:
    """The config's clipping against a plain module's own call."""

    class Clipped(Manual):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            self.clip_gradients(optimizer, 0.05, "norm")

    strategy = Zero3FastStrategy({"zero_optimization": SMALL, "gradient_clipping": 0.05})
    return compared(*(run(s, Clipped("two batches")) for s in (strategy, "auto")))


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_sees_the_sum_of_all_micro_batches(ranks, world_size):
    for seen in ranks(world_size).run(clipped):
        assert_equal(seen)
        assert min(seen["norms"][0]) > 0.05


def in_stock() -> dict[str, list[bool]]:
    """Whether stock, and ours with its semantics, end where a plain Trainer does."""
    same: dict[str, list[bool]] = {}
    for order in ("cleared in the middle", "two backwards", "one batch"):
        plain = weights(run("auto", Manual(order), epochs=1))
        strategies = (StockOnCPU(stage=3), Zero3FastStrategy(stock_semantics=True))
        others = [weights(run(strategy, Manual(order), epochs=1)) for strategy in strategies]
        assert all(torch.equal(a, b) for a, b in zip(*others, strict=True)), order
        same[order] = [
            all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(o, plain, strict=True)) for o in others
        ]
    return same


def test_stock_loses_gradients_and_stock_semantics_keep_that(ranks):
    assert ranks(1).run(in_stock)[0] == {
        "cleared in the middle": [False, False],
        "two backwards": [False, False],
        "one batch": [True, True],
    }
