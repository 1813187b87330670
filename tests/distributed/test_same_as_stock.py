# SPDX-License-Identifier: Apache-2.0
"""What "the same" means: given identical engine calls, every tensor, loss and norm has upstream's bits."""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_zero3 import STOCK, Zero3FastStrategy, Zero3Options
from lightning_zero3.collective_counts import counted_collectives
from lightning_zero3.substitution import substituted
from tests.distributed.stock import StockOnCPU
from tests.engines import PRECISIONS, build, micro_step, norm_of
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build_glm, tiny_glm
from tests.steps import expert_trained

STEPS = 5
# A bound that no gradient of these models reaches, and one that all exceed.
CLIPPING = {"off": 0.0, "on": 1e3, "saturated": 1e-2}


def trajectory(stock: bool, options: Zero3Options, **config: Any) -> tuple[list[float], list[float], Any]:
    engine = build(stock=stock, options=options, **config)
    losses, norms = [], []
    for step in range(STEPS * engine.gradient_accumulation_steps()):
        losses.append(micro_step(engine, step))
        if engine.was_step_applied():
            norms.append(norm_of(engine))
    return losses, norms, tensors_of(engine.optimizer)


def compare(precision: str) -> list[str]:
    compared = []
    for name, accumulate in (("off", 1), ("on", 3), ("saturated", 1), ("saturated", 3)):
        config = {
            **PRECISIONS[precision],
            "gradient_clipping": CLIPPING[name],
            "gradient_accumulation_steps": accumulate,
        }
        stock = trajectory(True, Zero3Options(), **config)
        assert len(stock[1]) == STEPS
        assert 1e-2 < max(stock[1]) < 1e3
        for options in (
            Zero3Options(),
            Zero3Options(scoped_grad_clear=False, alias_master_weights=False),
            Zero3Options(stock_semantics=True),
        ):
            ours = trajectory(False, options, **config)
            assert ours[:2] == stock[:2], (name, accumulate, options)
            assert_equal_bits(ours[2], stock[2])
        compared.append(f"{name} {accumulate}")
    return compared


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_switch_gives_stocks_bits(ranks, world_size, precision):
    for compared in ranks(world_size).run(compare, precision):
        assert len(compared) == 4


def expert_parallel(precision: str, size: int) -> list[float]:
    (stock, *stock_seen), (ours, *seen) = (
        expert_trained(is_stock, size, STEPS, **PRECISIONS[precision]) for is_stock in (True, False)
    )
    assert len(stock.optimizer.fp16_groups) > 3
    assert seen == stock_seen
    assert_equal_bits(tensors_of(ours.optimizer), tensors_of(stock.optimizer))
    return seen[0]


@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16 with fp32 masters", "bf16 masters"])
def test_expert_parallel_training_has_stocks_bits(ranks, world_size, size, precision):
    for losses in ranks(world_size).run(expert_parallel, precision, size):
        assert len(set(losses)) == STEPS


def whole_fits(precision: str, options: dict[str, Any]) -> None:
    stock = fit(Regression(), Pairs(), StockOnCPU(stage=3), precision=precision, **options)
    ours = fit(Regression(), Pairs(), Zero3FastStrategy(stock_semantics=True), precision=precision, **options)
    assert type(optimizer_of(stock)).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    assert ours.global_step == stock.global_step == 5
    assert ours.lightning_module.losses == stock.lightning_module.losses
    assert_equal_bits(tensors_of(optimizer_of(ours)), tensors_of(optimizer_of(stock)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=["plain", "accumulated and clipped"],
)
def test_a_fit_with_stock_semantics_equals_deepspeed_stage_3(ranks, world_size, precision, options):
    ranks(world_size).run(whole_fits, precision, options)


def a_fit(strategy: Any) -> tuple[dict[str, Any], list[float], dict[str, list[torch.Tensor]]]:
    module = Language(build_glm(tiny_glm()))
    with counted_collectives() as counted, counted_signatures() as signatures:
        trainer = fit(module, Sentences(tiny_glm().vocab_size), strategy)
    optimizer = optimizer_of(trainer)
    seen = {"collectives": counted.count, "signatures": signatures[0], "groups": len(optimizer.fp16_groups)}
    return seen, module.losses, tensors_of(optimizer)


@contextlib.contextmanager
def counted_signatures() -> Iterator[list[int]]:
    """How often functions' signatures are inspected, as stock's hooks do in each forward and backward."""
    real, counted = inspect.signature, [0]

    def signature(*args: Any, **kwargs: Any) -> inspect.Signature:
        counted[0] += 1
        return real(*args, **kwargs)

    with substituted(inspect, "signature", signature):
        yield counted


def fits_by_name() -> dict[str, dict[str, Any]]:
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 300}}
    # The first one inspects what is inspected once in a process. Stock changes the config that it's given.
    _, stock = (a_fit(StockOnCPU(config=copy.deepcopy(config))) for _ in range(2))
    chosen = {"zero3_stock": STOCK, "zero3_fast": {}}
    counts = {"deepspeed_stage_3": stock[0]}
    for name, options in chosen.items():
        counts[name], losses, tensors = a_fit(Zero3FastStrategy(config, **options))
        assert losses == stock[1], name
        assert_equal_bits(tensors, stock[2])
    return counts


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_zero3_stock_works_as_stock_does(ranks, world_size):
    """Its step is what ours is measured against on a user's machine, so none of our parts may be in it."""
    for counts in ranks(world_size).run(fits_by_name):
        assert counts["deepspeed_stage_3"]["groups"] > 5
        assert counts["zero3_stock"] == counts["deepspeed_stage_3"]
        assert counts["zero3_fast"]["collectives"] < counts["zero3_stock"]["collectives"]
        assert counts["zero3_fast"]["signatures"] < counts["zero3_stock"]["signatures"]
