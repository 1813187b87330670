# SPDX-License-Identifier: Apache-2.0
"""Aliasing: identity, bits, and that it happens exactly where weights and masters would be the same."""

import copy
from typing import Any

import pytest

from lightning_zero3 import Zero3FastStrategy
from tests import engines
from tests.distributed.stock import StockOnCPU
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of

# Name → (Trainer's precision, config, whether weights and masters are the same thing).
PRECISIONS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fp32": ("32-true", {}, True),
    "bf16 masters": ("bf16-mixed", engines.PRECISIONS["bf16 masters"], True),
    "autocast": ("32-true", engines.PRECISIONS["autocast"], True),
    "bf16 with fp32 masters": ("bf16-mixed", {}, False),
}
ZERO = {"zero_optimization": {"stage": 3, "sub_group_size": 100, "stage3_param_persistence_threshold": 20}}


def train(name: str, alias: bool, stock: bool = False) -> Any:
    precision, extra, _ = PRECISIONS[name]
    config = copy.deepcopy({**ZERO, **extra, "zero_allow_untested_optimizer": True})
    strategy = StockOnCPU(config=config) if stock else Zero3FastStrategy(config, alias_master_weights=alias)
    return fit(Regression(), Pairs(), strategy, precision=precision)


def identities(name: str) -> dict[str, Any]:
    optimizer = optimizer_of(train(name, alias=True))
    flats, masters = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    first = optimizer.lp_param_buffer.untyped_storage().data_ptr()
    return {
        "sub_groups": len(masters),
        "same": [flat is master for flat, master in zip(flats, masters, strict=True)],
        "in_buffer": [master.untyped_storage().data_ptr() == first for master in masters],
        "reported": optimizer.aliased_sub_groups(),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_master_is_its_weight_partition_exactly_where_they_are_equal(ranks, world_size, name):
    expected = PRECISIONS[name][2]
    for seen in ranks(world_size).run(identities, name):
        assert seen["sub_groups"] > 2
        assert seen["same"] == [expected] * seen["sub_groups"]
        assert seen["in_buffer"] == [expected] * seen["sub_groups"]
        assert seen["reported"] == (list(range(seen["sub_groups"])) if expected else [])


def parity(name: str) -> None:
    aliased, copied = train(name, alias=True), train(name, alias=False)
    assert not optimizer_of(copied).aliased_sub_groups()
    assert aliased.lightning_module.losses == copied.lightning_module.losses
    assert len(set(aliased.lightning_module.losses)) == len(aliased.lightning_module.losses)
    assert_equal_bits(tensors_of(optimizer_of(aliased)), tensors_of(optimizer_of(copied)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PRECISIONS)
def test_five_steps_are_bit_identical_to_a_forced_copy(ranks, world_size, name):
    ranks(world_size).run(parity, name)


def stock_copies(name: str) -> tuple[bool, list[bool], str]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.capabilities.fixes import MASTER_ALIAS

    optimizer = optimizer_of(train(name, alias=False, stock=True))
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    storages = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in pairs]
    return MASTER_ALIAS.mended(DeepSpeedZeroOptimizer_Stage3), storages, type(optimizer).__name__


@pytest.mark.parametrize("name", ["fp32", "bf16 masters", "autocast"])
def test_stock_keeps_two_copies(ranks, name):
    mended, shared, optimizer = ranks(1).run(stock_copies, name)[0]
    if mended:
        pytest.skip("the installed DeepSpeed shares weights and masters by itself")
    assert optimizer == "DeepSpeedZeroOptimizer_Stage3"
    assert shared
    assert not any(shared)


def stock_parity(name: str) -> None:
    ours, stock = train(name, alias=True), train(name, alias=False, stock=True)
    assert ours.lightning_module.losses == stock.lightning_module.losses
    assert_equal_bits(tensors_of(optimizer_of(ours)), tensors_of(optimizer_of(stock)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PRECISIONS)
def test_five_steps_are_bit_identical_to_stock(ranks, world_size, name):
    ranks(world_size).run(stock_parity, name)


def offloaded(section: dict[str, Any]) -> tuple[int, list[float]]:
    zero = {**ZERO["zero_optimization"], **section}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(config), steps=2)
    optimizer = optimizer_of(trainer)
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    shared = sum(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in pairs)
    return shared, trainer.lightning_module.losses


@pytest.mark.parametrize(
    "section",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ],
    ids=["optimizer", "optimizer and parameters"],
)
def test_nothing_is_shared_when_something_is_offloaded(ranks, section):
    shared, losses = ranks(1).run(offloaded, section)[0]
    assert shared == 0
    assert len(losses) == 2


def offload_strategy() -> tuple[list[float], list[float], int]:
    plain = fit(Regression(), Pairs(), "zero3_fast")
    offload = fit(Regression(), Pairs(), "zero3_fast_offload")
    assert optimizer_of(offload).offload_optimizer
    return (
        plain.lightning_module.losses,
        offload.lightning_module.losses,
        len(optimizer_of(offload).aliased_sub_groups()),
    )


def test_the_offload_strategy_trains_with_a_torch_optimizer(ranks):
    for plain, offload, aliased in ranks(2).run(offload_strategy):
        assert offload == pytest.approx(plain, rel=1e-5)
        assert aliased == 0


def edited() -> tuple[float, float, int]:
    import deepspeed

    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(copy.deepcopy(ZERO)), steps=1)
    parameter = trainer.lightning_module.net[0].weight
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.fill_(0.5)
    optimizer = optimizer_of(trainer)
    index = next(i for i, group in enumerate(optimizer.fp16_groups) if any(p is parameter for p in group))
    master = optimizer.fp32_partitioned_groups_flat[index]
    return float(master[0]), float(parameter.ds_tensor[0]), len(optimizer.aliased_sub_groups())


def test_an_edit_of_gathered_weights_reaches_the_master(ranks):
    master, weight, aliased = ranks(1).run(edited)[0]
    assert master == weight == 0.5
    assert aliased > 0


def another_layout() -> str:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    from lightning_zero3.substitution import substituted
    from tests.engines import build

    assert isinstance(build().optimizer.device, str)
    real = Stage3._create_fp32_partitions

    def copies_all_the_same(self: Any) -> None:
        self.device = str(self.device)
        real(self)

    with (
        substituted(Stage3, "_create_fp32_partitions", copies_all_the_same),
        pytest.raises(RuntimeError, match="should share its weights") as caught,
    ):
        build()
    return str(caught.value)


def test_a_release_that_does_not_alias_where_it_should_is_noticed(ranks):
    assert "alias_master_weights=False" in ranks(1).run(another_layout)[0]


@pytest.mark.parametrize("moved", ["offload_optimizer", "offload_param", "swap_optimizer", "zenflow"])
def test_whatever_moves_weights_or_masters_keeps_two_copies(moved):
    from lightning_zero3.optimizer.master_alias import MasterAlias

    class Optimizer(MasterAlias):
        offload_optimizer = offload_param = swap_optimizer = zenflow = False

    assert not Optimizer()._keeps_two_copies()
    setattr(Optimizer, moved, True)
    assert Optimizer()._keeps_two_copies()
