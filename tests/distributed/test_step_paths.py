# SPDX-License-Identifier: Apache-2.0
"""The report's table of paths through ``step()``: on each, with the clear on and off, no gradient is left behind.

DeepSpeed has no fp16 on a CPU; its overflow path (``_overflow_clean_up``) is also the one that a norm which is no
number takes.
"""

from typing import Any

import pytest
import torch

from lightning_zero3.config import Zero3Options
from tests.engines import Trainable, build, micro_step
from tests.fits import assert_equal_bits, tensors_of

STEPS = 3


def gradients_left(engine: Any) -> int:
    return sum(p.grad is not None for group in engine.optimizer.fp16_groups for p in group)


def run(engine: Any, scales: tuple[float, ...] = (1.0,) * STEPS) -> dict[str, Any]:
    """Steps whose losses are multiplied by ``scales``; what was applied, and what was left after each."""
    applied, left, norms = [], [], []
    for step, scale in enumerate(scales):
        micro_step(engine, step, scale)
        applied.append(engine.was_step_applied())
        left.append(gradients_left(engine))
        norms.append(float(engine.get_global_grad_norm()))
    return {"applied": applied, "left": left, "norms": norms, "skipped": engine.skipped_steps}


def both(scales: tuple[float, ...] = (1.0,) * STEPS, **config: Any) -> dict[str, Any]:
    """The same steps with the clear on and off; their tensors must have the same bits."""
    on = build(options=Zero3Options(scoped_grad_clear=True), **config)
    seen = run(on, scales)
    off = build(options=Zero3Options(scoped_grad_clear=False), **config)
    assert run(off, scales) == seen
    if not on.optimizer.swap_optimizer:
        assert_equal_bits(tensors_of(on.optimizer), tensors_of(off.optimizer))
    # Without the padding at the end of the last rank's partitions, which is whatever the memory held.
    finite = all(bool(torch.isfinite(weight).all()) for weight in tensors_of(on.optimizer)["weights"])
    return {**seen, "finite": finite, "sub_groups": len(on.optimizer.fp16_groups)}


def test_normal(ranks):
    seen = ranks(1).run(both)[0]
    assert seen["applied"] == [True] * STEPS
    assert seen["left"] == [0] * STEPS
    assert seen["sub_groups"] > 2


def overflow(precision: dict[str, Any]) -> dict[str, Any]:
    return both(scales=(1.0, float("nan"), 1.0, float("inf"), 1.0), **precision)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_norm_that_is_no_number_skips_the_step(ranks, world_size, precision):
    for seen in ranks(world_size).run(overflow, precision):
        assert seen["applied"] == [True, False, True, False, True]
        assert seen["skipped"] == 2
        assert seen["left"] == [0] * 5
        assert seen["finite"]
        assert [norm == float("inf") for norm in seen["norms"]] == [False, True, False, True, False]


def nan_like_upstream() -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from lightning_zero3.capabilities.fixes import INVALID_NORM

    scales = (1.0, float("nan"))
    ours = build(options=Zero3Options(stock_semantics=True))
    stock = build(stock=True)
    seen = [run(engine, scales)["applied"] for engine in (ours, stock)]
    return {"applied": seen, "mended": INVALID_NORM.mended(DeepSpeedZeroOptimizer_Stage3)}


def test_with_stock_semantics_upstream_decides(ranks):
    seen = ranks(1).run(nan_like_upstream)[0]
    assert seen["applied"][0] == seen["applied"][1] == [True, not seen["mended"]]


def test_cpu_optimizer_offload(ranks):
    seen = ranks(1).run(offload)[0]
    assert seen["applied"] == [True] * STEPS
    assert seen["left"] == [0] * STEPS


def offload() -> dict[str, Any]:
    return both(zero={"offload_optimizer": {"device": "cpu"}})


# Two layers of more than 1 MiB in fp32, which the swapper takes, and small ones, which it leaves.
MIXED = (600, 600, 13, 600, 7)


class Mixed(Trainable):
    def __init__(self) -> None:
        super().__init__(dims=MIXED)


def nvme(folder: str, scoped: bool) -> dict[str, Any]:
    # Every sub-group is one parameter, so that swappable and non-swappable ones stand side by side.
    zero = {
        "offload_optimizer": {"device": "nvme", "nvme_path": folder, "buffer_count": 6, "pin_memory": False},
    }
    model = Mixed()
    engine = build(
        model,
        options=Zero3Options(scoped_grad_clear=scoped),
        sub_group_size=1,
        zero=zero,
        aio={"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    )
    optimizer = engine.optimizer
    swappable = [optimizer._swappable_optimizer_subgroup(index) for index in range(len(optimizer.fp16_groups))]
    generator = torch.Generator().manual_seed(5)
    losses, left = [], []
    for step in range(STEPS):
        x, y = torch.randn(2, MIXED[0], generator=generator), torch.randn(2, MIXED[-1], generator=generator)
        loss = engine((x, y), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        left.append(gradients_left(engine))
    return {"swappable": swappable, "losses": losses, "left": left, "offload": optimizer.offload_optimizer}


@pytest.mark.usefixtures("async_io")
def test_nvme_swap_with_swappable_and_other_sub_groups_mixed(ranks, tmp_path):
    on = ranks(1).run(nvme, str(tmp_path / "on"), True)[0]
    off = ranks(1).run(nvme, str(tmp_path / "off"), False)[0]
    assert {True, False} <= set(on["swappable"])
    assert on["left"] == off["left"] == [0] * STEPS
    assert on["losses"] == off["losses"]
    assert len(set(on["losses"])) == STEPS
    # The loop prepares gradients only where nothing is offloaded: with NVMe it clears nothing, before or after.
    assert on["offload"]
