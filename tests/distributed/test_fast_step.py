# SPDX-License-Identifier: Apache-2.0
"""The merged step: every tensor has stock's bits, in every setting that changes how the step goes.

The matrix over precisions, clipping, accumulation and switches is in ``test_same_as_stock.py`` too, for the switches
together; here each is on alone, and the settings are those that the merged step treats in a way of its own.
"""

from typing import Any

import pytest
import torch

from benchmarks.step_arms import one_group_per_expert_tensor
from lightning_zero3.config import Zero3Options
from tests.engines import PRECISIONS, Trainable, batch_of, build
from tests.fits import assert_equal_bits, tensors_of
from tests.steps import (
    STEPS,
    SWITCHES,
    equal,
    expert_trained,
    merged,
    only,
    optimizers,
    pair,
    state_of,
    steps_of,
    trained,
)


def each_switch(precision: str) -> dict[str, list[int]]:
    calls: dict[str, list[int]] = {}
    for clipping, accumulate in ((0.0, 1), (1e3, 2), (1e-2, 1)):
        config = {"gradient_clipping": clipping, "gradient_accumulation_steps": accumulate, **PRECISIONS[precision]}
        stock = trained(True, Zero3Options(), **config)
        for switch in (*SWITCHES, "all"):
            ours = trained(False, Zero3Options() if switch == "all" else only(switch), **config)
            equal(ours, stock)
            calls.setdefault(switch, []).append(merged(ours[0]))
    return calls


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_switch_alone_and_all_have_stocks_bits(ranks, world_size, precision):
    for calls in ranks(world_size).run(each_switch, precision):
        for switch, made in calls.items():
            assert all(made) if switch in ("all", "batch_optimizer_step") else not any(made)


def kinds(kind: str, precision: str) -> list[tuple[int, int]]:
    calls = []
    for clipping, budget in ((0.0, None), (1e-2, 1000)):
        options = Zero3Options(step_bytes_budget=budget)
        ours = pair(options, kind, gradient_clipping=clipping, **PRECISIONS[precision])[1].optimizer
        calls.append((ours.optimizer_calls, ours.step_chunks))
    return calls


MERGED = [
    "AdamW",
    "AdamW foreach",
    "AdamW fused",
    "AdamW amsgrad",
    "Adam",
    "SGD",
    "SGD foreach, Nesterov",
    "FusedAdam",
    "FusedAdam, lists",
]


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), (2, "bf16 with fp32 masters"), (2, "bf16 masters")])
@pytest.mark.parametrize("kind", MERGED)
def test_groups_with_hyper_parameters_of_their_own(ranks, world_size, precision, kind):
    for (unlimited, chunks), (limited, smaller_chunks) in ranks(world_size).run(kinds, kind, precision):
        # Three groups, two sets of hyper-parameters. Foreach implementations need memory for all that one call updates,
        # and loops for one tensor more than the one that they are at.
        assert chunks == 1 or "foreach" in kind or kind.startswith("Adam")
        assert unlimited <= 2 * chunks
        assert smaller_chunks >= chunks
        assert limited <= 2 * smaller_chunks


def without_state() -> None:
    # Sizes of whole vectors: sub-groups are updated as one tensor.
    engines = [
        build(model := Trainable((13, 64, 64, 7)), stock=stock, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
        for stock in (True, False)
    ]
    stock_seen, seen = (steps_of(engine) for engine in engines)
    assert seen == stock_seen
    stock, ours = (state_of(engine) for engine in engines)
    assert ours.pop("moments") == stock.pop("moments") == []
    assert_equal_bits(ours, stock)


def test_an_optimizer_that_keeps_no_state(ranks):
    ranks(1).run(without_state)


@pytest.mark.parametrize("kind", ["Adagrad", "own class"])
def test_other_optimizers_are_called_as_upstream_does(ranks, kind):
    assert ranks(2).run(kinds, kind, "bf16 with fp32 masters") == [[(0, 0), (0, 0)]] * 2


def persistence(threshold: int) -> tuple[int, int]:
    stock, ours = pair(Zero3Options(), zero={"stage3_param_persistence_threshold": threshold})
    return len(ours.optimizer.persistent_parameters), len(stock.optimizer.persistent_parameters)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("threshold", "expected"), [(0, 0), (20, 2), (10**9, 6)])
def test_none_some_and_all_parameters_persist(ranks, world_size, threshold, expected):
    assert ranks(world_size).run(persistence, threshold) == [(expected, expected)] * world_size


def frozen(precision: str) -> list[int]:
    def half_frozen() -> Trainable:
        model = Trainable()
        model.net[2].weight.requires_grad_(False)
        model.net[0].bias.requires_grad_(False)
        return model

    def stock_then_ours(stock: bool) -> Any:
        model = half_frozen()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = build(model, stock=stock, optimizer=torch.optim.AdamW(trained, lr=1e-2), **PRECISIONS[precision])
        return engine, steps_of(engine)

    (stock, stock_seen), (ours, seen) = stock_then_ours(True), stock_then_ours(False)
    assert seen == stock_seen
    assert_equal_bits(state_of(ours), state_of(stock))
    first = merged(ours)
    # Frozen once training is under way: upstream steps with zeros in place of its gradient.
    for engine in (stock, ours):
        engine.module.net[2].bias.requires_grad_(False)
        steps_of(engine, range(STEPS, STEPS + 2))
    assert_equal_bits(tensors_of(ours.optimizer), tensors_of(stock.optimizer))
    return [first]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16 with fp32 masters"])
def test_frozen_parameters(ranks, world_size, precision):
    for (calls,) in ranks(world_size).run(frozen, precision):
        assert calls == 1 if precision != "fp32" else calls >= 1


def not_a_number(precision: str) -> list[bool]:
    factors = (1.0, float("nan"), 1.0, float("inf"))
    options = Zero3Options(stock_semantics=True)
    ours = pair(options, factors=factors, gradient_clipping=1.0, **PRECISIONS[precision])[1]
    return [ours.was_step_applied(), ours.optimizer.averaged_gradients == {}]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16 with fp32 masters"])
def test_a_step_that_is_skipped(ranks, world_size, precision):
    # 0.19.7 applies such a step, and then every weight is NaN, which equals nothing.
    if not ranks(1).run(upstream_skips)[0]:
        pytest.skip("this release applies the step")
    assert ranks(world_size).run(not_a_number, precision) == [[False, True]] * world_size


def upstream_skips() -> bool:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.capabilities.fixes import INVALID_NORM

    return INVALID_NORM.mended(DeepSpeedZeroOptimizer_Stage3)


def loss_scaled() -> int:
    """A loss scale of its own: DeepSpeed has no fp16 on a CPU, so it is set on the optimizer."""
    engines = []
    for stock in (True, False):
        engine = build(stock=stock, gradient_clipping=0.5, bf16={"enabled": True})
        engine.optimizer.override_loss_scale(64.0)
        engines.append((engine, steps_of(engine)))
    (stock_engine, stock_seen), (ours, seen) = engines
    assert seen == stock_seen
    assert_equal_bits(state_of(ours), state_of(stock_engine))
    return merged(ours)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_scale(ranks, world_size):
    assert ranks(world_size).run(loss_scaled) == [1] * world_size


def expert_parallel(torch_adam: bool, size: int) -> tuple[int, int]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": torch_adam}}
    runs = []
    for stock in (True, False):
        with one_group_per_expert_tensor():
            runs.append(expert_trained(stock, size, STEPS, optimizer=optimizer, bf16={"enabled": True}))
    (stock_engine, _, stock_norms), (ours, _, norms) = runs
    assert norms == stock_norms
    assert_equal_bits(state_of(ours), state_of(stock_engine))
    return merged(ours), len(ours.optimizer.optimizer.param_groups)


@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("torch_adam", [True, False], ids=["AdamW", "FusedAdam"])
def test_expert_parallel_groups(ranks, world_size, size, torch_adam):
    for calls, groups in ranks(world_size).run(expert_parallel, torch_adam, size):
        assert groups == 4  # the dense parameters', and one for each of the layer's three expert tensors
        assert calls == 1


def resumed(folder: str, kind: str) -> None:
    def engine_of(stock: bool) -> Any:
        model = Trainable()
        return build(model, stock=stock, optimizer=optimizers(model.parameters(), kind), gradient_clipping=0.5)

    first = engine_of(True)
    steps_of(first)
    first.save_checkpoint(folder, tag="stock")
    stock, ours = engine_of(True), engine_of(False)
    for engine in (stock, ours):
        engine.load_checkpoint(folder, tag="stock")
    later = range(STEPS, 2 * STEPS)
    assert steps_of(ours, later) == steps_of(stock, later)
    assert_equal_bits(state_of(ours), state_of(stock))
    assert ours.optimizer.optimizer.param_groups == stock.optimizer.optimizer.param_groups
    assert merged(ours) == ours.optimizer.step_chunks + 1  # in one of the chunks two sets of hyper-parameters meet


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam"])
def test_resuming_from_a_stock_checkpoint(ranks, world_size, kind, tmp_path):
    ranks(world_size).run(resumed, str(tmp_path), kind)


def moved() -> None:
    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

    assert FastStage3Optimizer.switches.batch_optimizer_step
    engines = [build(stock=stock, gradient_clipping=0.5) for stock in (True, False)]
    for engine in engines:
        steps_of(engine, range(2))
    ours = engines[1]
    for step in range(2, 5):
        for engine in engines:
            engine.backward(engine(batch_of(engine, step), step))
        # Weights and masters move between backward and step; the addresses that were right a step ago are wrong now.
        ours.optimizer.offload_states()
        ours.optimizer.reload_states()
        for engine in engines:
            engine.optimizer.independent_gradient_partition_epilogue()
            engine.step()
    assert_equal_bits(tensors_of(engines[1].optimizer), tensors_of(engines[0].optimizer))


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_that_moved_between_backward_and_step(ranks, world_size):
    ranks(world_size).run(moved)
