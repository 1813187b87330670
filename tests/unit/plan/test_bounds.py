# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of times, by hand."""

from __future__ import annotations

from dataclasses import fields

import pytest

from lightning_zero3.config import SetupError
from lightning_zero3.gpus import GPUS, Gpu, gpu
from lightning_zero3.plan.bounds import bounds_of, optimizer_bytes_per_element, optimizer_step_seconds
from lightning_zero3.plan.flops import Flops
from lightning_zero3.plan.structure import Collectives, Dtypes, Structure
from lightning_zero3.plan.traffic import Traffic


def structure(aliased: bool = False, weights: str = "bf16", masters: str = "fp32") -> Structure:
    given = {
        "dtypes": Dtypes(weights=weights, masters=masters, states=masters, gradients=masters, reductions=weights),
        "elements_per_rank": 1_000_000,
        "aliased": aliased,
        "collectives_stock": Collectives(all_reduce=0, all_gather=0),
    }
    return Structure(**{field.name: () for field in fields(Structure)} | given)  # type: ignore[arg-type]


SLOW = Gpu(
    name="slow",
    memory_gib=1,
    hbm_bytes_per_second=1e6,
    bf16_flops=1e3,
    node_bytes_per_second=100,
    network_bytes_per_second=10,
    host_bytes_per_second=5,
    host_memory_bytes_per_second=1e5,
    sources={},
)
FLOPS = Flops(linear=100, experts=200, attention=50, indexer=0, linear_attention=0, logits=150)


def message(kind: str, ranks: int, stride: int, size: int) -> Traffic:
    return Traffic(what="", kind=kind, group_size=ranks, stride=stride, buffer_bytes=size)  # type: ignore[arg-type]


def test_bytes_of_an_update() -> None:
    # bf16 with fp32 masters: gradient twice, master, two moments read and written, weights written.
    assert optimizer_bytes_per_element(structure()) == 8 + 8 + 16 + 2
    assert optimizer_bytes_per_element(structure(weights="fp32")) == 8 + 8 + 16 + 4
    assert optimizer_bytes_per_element(structure(aliased=True, weights="fp32")) == 8 + 8 + 16
    assert optimizer_bytes_per_element(structure(aliased=True, masters="bf16")) == 4 + 4 + 8
    assert optimizer_bytes_per_element(structure(), "sgd") == 8 + 8 + 2
    assert optimizer_step_seconds(structure(), SLOW) == pytest.approx(34)


def test_what_is_sent_where() -> None:
    assert message("all-gather", 4, 1, 800).sent_bytes == 600
    assert message("all-reduce", 4, 1, 800).sent_bytes == 1200

    def seconds(*messages: Traffic) -> tuple[float, float]:
        found = bounds_of(structure(), FLOPS, messages, SLOW, devices=4)
        return found.node_links * 100, found.network * 10

    # Within a node; one rank on each of 4 nodes; 8 ranks on 2 nodes, whose 4 cards bring in the other half of 800.
    assert seconds(message("all-gather", 4, 1, 800)) == pytest.approx((600, 0))
    assert seconds(message("reduce-scatter", 4, 4, 800)) == pytest.approx((0, 600))
    assert seconds(message("all-gather", 8, 1, 800)) == pytest.approx((600, 100))
    # Half of what is exchanged goes to the other node, 3 of 8 to neighbours, one of 8 stays.
    assert seconds(message("all-to-all", 8, 1, 800)) == pytest.approx((300, 400))


def test_the_step_with_and_without_overlap() -> None:
    found = bounds_of(structure(), FLOPS, [message("all-gather", 4, 4, 800)], SLOW, micro_steps=2, devices=4)
    assert found.compute == pytest.approx((4 * 350 + 3 * 150) * 2 / 1e3)
    assert found.without_overlap == pytest.approx(34 + 3.7 + 60)
    assert found.with_overlap == pytest.approx(34 + 60)


def test_offload() -> None:
    found = bounds_of(structure(), FLOPS, [], SLOW, host_bytes=100, on_host=True)
    assert found.optimizer == pytest.approx(340)
    assert found.host_link == pytest.approx(20)
    # Hidden behind computing as far as that goes.
    assert found.with_overlap == pytest.approx(340 + max(20, found.compute))
    # fp32 is computed at half the rate at most.
    assert bounds_of(structure(weights="fp32"), FLOPS, [], SLOW).compute == pytest.approx(2 * found.compute)


@pytest.mark.parametrize("each", GPUS.values(), ids=lambda each: each.name)
def test_every_figure_has_its_source(each: Gpu) -> None:
    figures = {field.name for field in fields(Gpu)} - {"name", "sources"}
    assert set(each.sources) == figures
    for source in each.sources.values():
        assert "https://" in source
    assert gpu(each.name.lower()) is each
    # Nothing is off by a power of ten, or counts both directions or sparsity.
    assert 70 < each.memory_gib < 200
    assert 3e12 < each.hbm_bytes_per_second < 9e12
    assert 9e14 < each.bf16_flops < 2.4e15
    assert each.network_bytes_per_second < each.node_bytes_per_second < 1e12


def test_a_gpu_that_nobody_knows() -> None:
    with pytest.raises(SetupError, match="H100, H200, B200, MI300X"):
        gpu("H1000")
