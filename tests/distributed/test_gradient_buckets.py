# SPDX-License-Identifier: Apache-2.0
"""Gradients of two process groups wait side by side: stock's bits, fewer reductions, no more memory."""

from typing import Any

import pytest
import torch

from lightning_zero3.config import Zero3Options
from lightning_zero3.moe.expert_parallel import find_target
from lightning_zero3.optimizer.gradient_buckets import _FromItsEnd
from tests.engines import build
from tests.fits import Sentences, assert_equal_bits, tensors_of
from tests.models import build_glm, tiny_glm

LAYERS = 6
STEPS, ACCUMULATED = 2, 2


class Reductions:
    """Of each reduction of an engine's optimizer: which parameters, how many elements wait in all buckets then."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._reduce = optimizer, optimizer._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
        self.parameters: list[list[Any]] = []
        self.waiting: list[int] = []
        optimizer._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = self

    def __call__(self, parameters: list[Any], dtype: torch.dtype) -> Any:
        first = getattr(self._optimizer, "_first", None)
        buckets = (
            [*self._optimizer.ipg_buckets.values()]
            if first is None
            else [*first.values(), *self._optimizer._second.values()]
        )
        self.parameters.append(list(parameters))
        self.waiting.append(sum(bucket.elements for bucket in buckets))
        return self._reduce(parameters, dtype)

    def elements(self) -> list[int]:
        return [sum(p.ds_numel for p in parameters) for parameters in self.parameters]


def trained(name: str, bucket: int, experts: int, **zero: Any) -> tuple[Any, Reductions, list[Any], Any]:
    """An engine after some steps: stock's, ours, or ours without the switch."""
    model = build_glm(tiny_glm(num_hidden_layers=LAYERS), seed=3)
    engine = build(
        model,
        stock=name == "stock",
        options=Zero3Options(bucket_per_process_group=name == "ours"),
        target=find_target(model),
        sub_group_size=10_000,
        zero={"reduce_bucket_size": bucket, **zero},
        gradient_accumulation_steps=ACCUMULATED,
        gradient_clipping=0.5,
        expert_parallel={"enabled": True, "autoep_size": experts, "preset_model": "deepseek_v3"},
    )
    reductions = Reductions(engine.optimizer)
    data, rank = Sentences(model.config.vocab_size), torch.distributed.get_rank()
    seen = []
    for step in range(STEPS * ACCUMULATED):
        ids = data.ids[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.get_global_grad_norm()))
    return engine, reductions, seen, tensors_of(engine.optimizer)


def against_stock(bucket: int, experts: int, zero: dict[str, Any]) -> dict[str, Any]:
    runs = {name: trained(name, bucket, experts, **zero) for name in ("stock", "ours", "off")}
    _, reductions, seen, tensors = runs["stock"]
    for name in ("ours", "off"):
        assert runs[name][2] == seen
        assert_equal_bits(runs[name][3], tensors)
    ours = runs["ours"][0].optimizer
    assert all(torch.is_tensor(each.buffer) or each.buffer is None for each in ours.ipg_buckets.values())
    assert not any(each.params for each in ours.ipg_buckets.values())
    groups = {id(ours._get_param_partition_group(p)): 0 for group in ours.fp16_groups for p in group}
    for group in ours.fp16_groups:
        for parameter in group:
            groups[id(ours._get_param_partition_group(parameter))] += parameter.ds_numel
    backwards = STEPS * ACCUMULATED
    return {
        "stock": len(reductions.parameters) / backwards,
        "ours": len(runs["ours"][1].parameters) / backwards,
        "off": len(runs["off"][1].parameters) / backwards,
        "elements": sum(runs["ours"][1].elements()) // backwards,
        "most waiting": max(runs["ours"][1].waiting),
        "groups": sorted(groups.values()),
    }


@pytest.mark.parametrize(
    "zero",
    [
        {},
        pytest.param({"contiguous_gradients": False}, marks=pytest.mark.slow),
        pytest.param({"overlap_comm": True}, marks=pytest.mark.slow),
    ],
    ids=["", "no buffer", "overlap"],
)
@pytest.mark.parametrize("experts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_backward_reduces_each_group_once_where_all_fits(ranks, experts, zero):
    for seen in ranks(2).run(against_stock, 500_000, experts, zero):
        assert seen["ours"] == len(seen["groups"]) == 2
        assert seen["elements"] == sum(seen["groups"])
        # The first layer is dense; each other one has its experts between two pieces of all the rest.
        assert seen["stock"] == seen["off"] == 2 * (LAYERS - 1) + 1


@pytest.mark.parametrize("bucket", [40_000, pytest.param(9_000, marks=pytest.mark.slow)])
def test_no_more_waits_than_one_bucket_holds(ranks, bucket):
    for seen in ranks(2).run(against_stock, bucket, 2, {}):
        assert seen["most waiting"] <= bucket
        assert seen["elements"] == sum(seen["groups"])
        # The fuller of two is at least half full when it has to go.
        assert seen["ours"] <= sum(-(-elements // (bucket // 2)) for elements in seen["groups"])
        assert seen["ours"] < seen["stock"]


@pytest.mark.slow
def test_gradients_larger_than_the_bucket(ranks):
    for seen in ranks(2).run(against_stock, 1_500, 2, {}):
        assert seen["elements"] == sum(seen["groups"])
        assert seen["ours"] <= seen["stock"]


def test_one_rank_has_stocks_bits(ranks):
    (seen,) = ranks(1).run(against_stock, 500_000, 1, {})
    assert seen["ours"] <= 2
    assert seen["stock"] > 2


def test_a_buffer_is_handed_out_from_its_end():
    bucket = type("Bucket", (), {"buffer": torch.arange(10)})
    from_its_end = _FromItsEnd(bucket)
    assert from_its_end.narrow(0, 0, 3).tolist() == [7, 8, 9]
    assert from_its_end.narrow(0, 3, 2).tolist() == [5, 6]
    assert from_its_end.narrow(0, 5, 5).tolist() == [0, 1, 2, 3, 4]


def after_a_backward_that_fails() -> bool:
    engine, *_ = trained("ours", 500_000, 2)
    model = engine.module
    layer = model.model.layers[1]
    broken = layer.register_full_backward_pre_hook(lambda *_: 1 / 0)
    ids = Sentences(model.config.vocab_size).ids[:2]
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    broken.remove()
    optimizer = engine.optimizer
    left = optimizer._first is not None
    optimizer._pre_step()
    return left and all(torch.is_tensor(each.buffer) and not each.params for each in optimizer.ipg_buckets.values())


def test_what_a_failed_backward_leaves_is_dropped(ranks):
    assert ranks(2).run(after_a_backward_that_fails) == [True, True]
