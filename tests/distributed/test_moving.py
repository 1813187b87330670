# SPDX-License-Identifier: Apache-2.0
"""States of an aliased optimizer to the host and back: the bits of a run that never moved anything.

On the CPU accelerator page-locking is a no-op, so what is tested of it here is which buffer is used, not the speed.
"""

import copy
import gc
import itertools
import time
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy, Zero3Options
from tests.engines import PRECISIONS, Trainable, assert_aliased, build, micro_step
from tests.fits import Pairs, Regression, assert_equal_bits, fit, tensors_of

PAIR = ("hp_params", "lp_params")
STATES = ("optim_states", *PAIR, "lp_grads", "contiguous_grad_buffer")
ALIASED = ["fp32", "bf16 masters", "autocast"]


def states(names: Any) -> Any:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return None if names is None else [OffloadStateTypeEnum(name) for name in names]


def gone(reference: Any, seconds: float = 2.0) -> bool:
    """Whether a storage is freed; gloo lets go of buffers a moment after a collective."""
    deadline = time.monotonic() + seconds
    while not torch.UntypedStorage._expired(reference) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return torch.UntypedStorage._expired(reference)


def reviews_sequence(precision: str) -> None:
    moved, never = (build(**PRECISIONS[precision]) for _ in range(2))
    for step, include in enumerate((["hp_params"], ["lp_params"])):
        for engine in (moved, never):
            micro_step(engine, step)
        before = tensors_of(moved.optimizer)
        moved.offload_states(include=states(include))
        moved.reload_states()
        assert_equal_bits(before, tensors_of(moved.optimizer))
        assert_aliased(moved.optimizer)
    for engine in (moved, never):
        micro_step(engine, 2)
    assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ALIASED)
def test_the_reviews_sequence(ranks, world_size, precision):
    ranks(world_size).run(reviews_sequence, precision)


def every_subset(precision: str, every_way: bool) -> int:
    moved, never = build(**PRECISIONS[precision]), build(stock=True, **PRECISIONS[precision])
    subsets = [None, *(s for n in range(len(STATES) + 1) for s in itertools.combinations(STATES, n))]
    ways = list(itertools.product((True, False), (True, False)))
    # Every subset in every way, or each in the way whose turn it is.
    trips = (
        [(s, *w) for s in subsets for w in ways] if every_way else [(s, *ways[i % 4]) for i, s in enumerate(subsets)]
    )
    step = 0
    for include, pinned, non_blocking in trips:
        for engine in (moved, never):
            micro_step(engine, step)
        moved.offload_states(include=states(include), pin_memory=pinned, non_blocking=non_blocking)
        away = moved.optimizer.offloaded_states
        if include is None or set(include) & set(PAIR):
            # Whichever of the two is asked for, both are gone.
            assert set(PAIR) <= {state.value for state in away}
        moved.reload_states(non_blocking=non_blocking)
        assert not moved.optimizer.offloaded_states
        assert_aliased(moved.optimizer)
        assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))
        step += 1
    assert moved.module.losses == never.module.losses
    return step


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ALIASED)
def test_every_subset_pinned_or_not_blocking_or_not_with_a_step_between(ranks, world_size, precision):
    assert set(ranks(world_size).run(every_subset, precision, False)) == {33}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ALIASED)
def test_every_subset_in_every_way(ranks, world_size, precision):
    assert set(ranks(world_size).run(every_subset, precision, True)) == {33 * 4}


def memory(pinned: bool) -> dict[str, Any]:
    engine = build()
    optimizer = engine.optimizer
    micro_step(engine, 0)
    weights = optimizer.lp_param_buffer.untyped_storage()._weak_ref()
    moments = [
        value.untyped_storage()._weak_ref()
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    ]
    engine.offload_states(include=states(["lp_params", "optim_states"]), pin_memory=pinned)
    freed = [gone(reference) for reference in (weights, *moments)]
    host = optimizer.lp_param_buffer.untyped_storage()._weak_ref()
    engine.reload_states()
    assert_aliased(optimizer)
    return {"freed": freed, "host_freed": gone(host, 0.5), "moments": len(moments)}


@pytest.mark.parametrize("pinned", [True, False])
def test_while_offloaded_no_device_storage_is_alive(ranks, pinned):
    for seen in ranks(2).run(memory, pinned):
        assert seen["moments"] > 4
        assert all(seen["freed"])
        # A page-locked buffer is kept for the next time, as upstream keeps its own.
        assert seen["host_freed"] is not pinned


def repeated() -> None:
    moved, never = (build() for _ in range(2))
    for engine in (moved, never):
        micro_step(engine, 0)
    # Twice before a reload; then without page-locking after with it; then in between backward and step.
    moved.offload_states(include=states(["hp_params"]))
    moved.offload_states(include=None)
    micro_losses = [engine.module.losses[-1] for engine in (moved, never)]
    assert micro_losses[0] == micro_losses[1]
    moved.reload_states()
    for step in range(1, 4):
        for engine in (moved, never):
            micro_step(engine, step)
        moved.offload_states(include=None, pin_memory=step % 2 == 0)
        moved.reload_states()
        assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))
    from tests.engines import batch_of

    for engine in (moved, never):
        engine.backward(engine(batch_of(engine, 5), 5))
        if engine is moved:
            engine.offload_states(include=states(["hp_params", "optim_states"]))
            engine.reload_states()
        engine.step()
    assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))


@pytest.mark.parametrize("world_size", [1, 2])
def test_repeated_and_changing_ways_of_moving(ranks, world_size):
    ranks(world_size).run(repeated)


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def with_optimizer(name: str, frozen: bool, regrouped: bool) -> int:
    engines = []
    for _ in range(2):
        model = Trainable()
        parameters = list(model.parameters())
        if frozen:
            parameters[2].requires_grad_(False)
        trained = [p for p in parameters if p.requires_grad]
        # Groups that aren't in the module's order, which upstream's own reload gets wrong.
        groups = [{"params": trained[3:]}, {"params": trained[:3]}] if regrouped else trained
        engines.append(build(model, optimizer=OPTIMIZERS[name](groups)))
    moved, never = engines
    for step in range(3):
        for engine in engines:
            micro_step(engine, step)
        moved.offload_states(include=None)
        moved.reload_states()
        assert_aliased(moved.optimizer)
        assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))
    assert moved.module.losses == never.module.losses
    return len(moved.optimizer.fp16_groups)


@pytest.mark.parametrize(("frozen", "regrouped"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_whose_state_is_tensors_with_frozen_and_regrouped_parameters(ranks, name, frozen, regrouped):
    if name == "Adagrad" and regrouped:
        pytest.skip("stock Stage 3 rebuilds Adagrad with one parameter group, and fails in its first step")
    assert ranks(1).run(with_optimizer, name, frozen, regrouped)[0] > 2


class Rebinding(torch.optim.SGD):
    """An optimizer that gives parameters new storage, as some users' do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def rebinding() -> None:
    models = Trainable(), Trainable()
    moved, never = (build(model, optimizer=Rebinding(model.parameters(), lr=1e-2)) for model in models)
    for step in range(3):
        for engine in (moved, never):
            micro_step(engine, step)
        moved.offload_states(include=states(["hp_params"]))
        moved.reload_states()
        assert_aliased(moved.optimizer)
        assert moved.module.losses == never.module.losses
        for left, right in zip(moved.module.parameters(), never.module.parameters(), strict=True):
            real = moved.optimizer.real_elements(left)
            assert torch.equal(left.ds_tensor[:real], right.ds_tensor[:real])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_rebinds_masters_loses_nothing(ranks, world_size):
    ranks(world_size).run(rebinding)


def loading_while_away(folder: str) -> str:
    engine = build()
    micro_step(engine, 0)
    engine.save_checkpoint(folder, tag="here")
    saved = tensors_of(engine.optimizer)
    engine.offload_states(include=None)
    engine.save_checkpoint(folder, tag="away")
    with pytest.raises(RuntimeError) as caught:
        engine.load_checkpoint(folder, tag="here")
    engine.reload_states()
    micro_step(engine, 1)
    for tag in ("here", "away"):
        engine.load_checkpoint(folder, tag=tag)
        assert_equal_bits(tensors_of(engine.optimizer), saved)
        assert_aliased(engine.optimizer)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_that_are_away_can_be_saved_but_not_loaded(ranks, world_size, tmp_path):
    for message in ranks(world_size).run(loading_while_away, str(tmp_path)):
        assert "reload_states()" in message


def two_copies(precision: str, name: str) -> None:
    moved, never = (
        build(
            model,
            optimizer=OPTIMIZERS[name](model.parameters()),
            options=Zero3Options(alias_master_weights=False),
            **PRECISIONS[precision],
        )
        for model in (Trainable(), Trainable())
    )
    subsets = [None, *((state,) for state in STATES), PAIR]
    for step, include in enumerate(subsets):
        for engine in (moved, never):
            micro_step(engine, step)
        moved.offload_states(include=states(include), pin_memory=step % 2 == 0)
        # Here masters and weights are two things, and only what is asked for moves.
        away = {state.value for state in moved.optimizer.offloaded_states}
        assert away == set(STATES if include is None else include)
        moved.reload_states()
        assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))
    assert moved.module.losses == never.module.losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("precision", "name"), [("bf16 with fp32 masters", "AdamW"), ("fp32", "SGD with momentum"), ("autocast", "Adagrad")]
)
def test_two_copies_move_each_for_itself(ranks, world_size, precision, name):
    ranks(world_size).run(two_copies, precision, name)


def stock_decides() -> str:
    engine = build(options=Zero3Options(alias_master_weights=False, stock_semantics=True))
    with pytest.raises(AssertionError) as caught:
        engine.offload_states(include=None)
    return str(caught.value)


def test_with_stock_semantics_and_two_copies_upstream_decides(ranks):
    assert "FusedAdam" in ranks(1).run(stock_decides)[0]


def some_aliased() -> int:
    """No DeepSpeed builds such a mixture yet; the decision is taken for each sub-group all the same."""
    moved, never = build(), build()
    for engine in (moved, never):
        master = engine.optimizer.fp32_partitioned_groups_flat[0]
        separate = master.detach().clone().requires_grad_()
        engine.optimizer.optimizer.state[separate] = engine.optimizer.optimizer.state.pop(master, {})
        engine.optimizer.fp32_partitioned_groups_flat[0] = separate
    for step in range(3):
        for engine in (moved, never):
            micro_step(engine, step)
        moved.offload_states(include=states([PAIR[step % 2]]))
        moved.reload_states()
        assert_equal_bits(tensors_of(moved.optimizer), tensors_of(never.optimizer))
    assert moved.module.losses == never.module.losses
    return len(moved.optimizer.aliased_sub_groups())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mixture_of_shared_and_other_sub_groups(ranks, world_size):
    for aliased in ranks(world_size).run(some_aliased):
        assert aliased > 0


def through_the_strategy() -> list[float]:
    strategy = Zero3FastStrategy(copy.deepcopy({"zero_optimization": {"stage": 3, "sub_group_size": 100}}))
    with pytest.raises(RuntimeError, match="during or after fit"):
        strategy.offload_states()

    class Moving(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.strategy.offload_states(["lp_params", "optim_states"], pin_memory=False)
            self.trainer.strategy.reload_states()

    trainer = fit(Moving(), Pairs(), strategy)
    assert_aliased(trainer.strategy.model.optimizer)
    with pytest.raises(ValueError, match=r"'weights' is none of .*lp_params"):
        strategy.offload_states(["weights"])
    plain = fit(Regression(), Pairs(), "zero3_fast")
    assert trainer.lightning_module.losses == plain.lightning_module.losses
    return trainer.lightning_module.losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_strategys_own_methods(ranks, world_size):
    for losses in ranks(world_size).run(through_the_strategy):
        assert len(losses) == 5
