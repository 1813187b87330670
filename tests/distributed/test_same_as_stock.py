"""What "the same" means: given identical engine calls, every tensor, loss and norm has upstream's bits."""

from typing import Any

import pytest

from lightning_zero3 import Zero3FastStrategy, Zero3Options
from tests.distributed.stock import StockOnCPU
from tests.engines import PRECISIONS, build, micro_step, norm_of
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of
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
