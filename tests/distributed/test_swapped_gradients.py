# SPDX-License-Identifier: Apache-2.0
"""An optimizer on NVMe trains as one on the CPU does, wherever in its sub-group a gradient begins."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from lightning_zero3.config import Zero3Options
from tests.engines import PRECISIONS, Trainable, build
from tests.fits import assert_equal_bits

STEPS = 3
# All in one sub-group: small ones, then 1.5 MiB on each of two ranks, which don't begin at a block; then it goes on.
DIMS = (13, 900, 900, 8)


class Deep(Trainable):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(dims=DIMS)


def trained(folder: str, device: str, precision: str, pipelined: bool, options: Zero3Options) -> dict[str, Any]:
    offload = {"device": device, "nvme_path": folder, "buffer_count": 8, "pin_memory": False}
    if pipelined:
        offload |= {"pipeline_read": True, "pipeline_write": True}
    engine = build(
        Deep(),
        options=options,
        sub_group_size=10**9,
        zero={"offload_optimizer": offload},
        gradient_clipping=1.0,
        **PRECISIONS[precision],
    )
    optimizer = engine.optimizer
    cut = [offset % 256 for offset, size in _places(optimizer) if 4 * size >= 2**20]
    generator = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    losses, gradients = [], []
    for step in range(STEPS):
        x, y = torch.randn(2, DIMS[0], generator=generator), torch.randn(2, DIMS[-1], generator=generator)
        dtype = next(engine.module.parameters()).dtype
        loss = engine((x.to(dtype), y.to(dtype)), step)
        engine.backward(loss)
        gradients += [safe_get_full_grad(parameter).clone() for parameter in engine.module.parameters()]
        engine.step()
        losses.append(loss.item())
    weights = [parameter.ds_tensor.clone() for parameter in optimizer.fp16_groups[0]]
    return {
        "losses": losses,
        "tensors": {"weights": weights, "gradients": gradients},
        "cut": cut,
    }


def _places(optimizer: Any) -> list[tuple[int, int]]:
    return [(offset, size) for _, offset, size in optimizer.grad_position.values()]


def on_nvme_and_cpu(folder: str, precision: str, pipelined: bool) -> dict[str, Any]:
    ours, cpu = (trained(folder, device, precision, pipelined, Zero3Options()) for device in ("nvme", "cpu"))
    assert ours["losses"] == cpu["losses"]
    assert_equal_bits(ours["tensors"], cpu["tensors"])
    return ours


@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize(
    ("world_size", "precision", "pipelined"),
    [
        (1, "fp32", False),
        (2, "bf16 with fp32 masters", False),
        pytest.param(1, "fp32", True, marks=pytest.mark.slow),
        pytest.param(2, "autocast", False, marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_begins_between_two_blocks_is_read_back(ranks, tmp_path, world_size, precision, pipelined):
    for seen in ranks(world_size).run(on_nvme_and_cpu, str(tmp_path), precision, pipelined):
        assert len(set(seen["losses"])) == STEPS
        assert seen["cut"]
        assert all(seen["cut"])


def stock_semantics(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(folder, "nvme", "fp32", False, Zero3Options(stock_semantics=True))
    return [str(each.message) for each in caught if "fails to read some gradients back" in str(each.message)]


@pytest.mark.usefixtures("async_io")
def test_with_stock_semantics_there_is_one_warning(ranks, tmp_path):
    assert len(ranks(1).run(stock_semantics, str(tmp_path))[0]) == 1
