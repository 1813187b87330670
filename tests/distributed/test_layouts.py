# SPDX-License-Identifier: Apache-2.0
"""Models and settings that lay out weights in other ways: with the alias on, stock's bits all the same."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_zero3.capabilities.fixes import INVALID_NORM
from lightning_zero3.config import Zero3Options
from tests.engines import PRECISIONS, Trainable, batch_of, build, norm_of
from tests.fits import assert_equal_bits, tensors_of

STEPS = 4


class Tied(Trainable):
    """The first layer's weight is used again, transposed, at the end."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        hidden = self.net[0](x)
        loss = ((self.net(x).float() - y.float()) ** 2).mean()
        again = torch.nn.functional.linear(hidden, self.net[0].weight.t())
        self.losses.append(loss.item())
        return loss + again.float().square().mean() * 0.1


class Shared(Trainable):
    """One module registered twice, as Hugging Face ties embeddings."""

    def __init__(self) -> None:
        super().__init__((13, 13, 13, 7))
        self.net[2].weight = self.net[0].weight


def frozen() -> torch.nn.Module:
    model = Trainable()
    model.net[2].weight.requires_grad_(False)
    return model


def built_in_partitions() -> torch.nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 8, "zero_optimization": {"stage": 3}}):
        return Trainable()


def muon(model: torch.nn.Module) -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() == 2
    return MuonWithAuxAdam(
        [
            {"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
            {
                "params": others,
                "use_muon": False,
                "lr": 1e-3,
                "betas": (0.9, 0.99),
                "eps": 1e-8,
                "weight_decay": 0.0,
            },
        ]
    )


# Name → (model, optimizer or None for AdamW, "zero_optimization", precisions, numbers of ranks).
ALL = tuple(PRECISIONS)
LAYOUTS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], tuple[str, ...], tuple[int, ...]]] = {
    "tied": (Tied, None, {}, ALL, (1, 2)),
    "registered twice": (Shared, None, {}, ALL, (1, 2)),
    "frozen": (frozen, None, {}, ALL, (1, 2)),
    "nothing persistent": (Trainable, None, {"stage3_param_persistence_threshold": 0}, ALL, (1, 2)),
    "all persistent": (Trainable, None, {"stage3_param_persistence_threshold": 10**9}, ALL, (1, 2)),
    "overlapping": (Trainable, None, {"overlap_comm": True}, ("fp32", "bf16 masters"), (2,)),
    "zero.Init": (built_in_partitions, None, {}, ("fp32", "autocast"), (1, 2)),
    "hpZeRO": (Trainable, None, {"zero_hpz_partition_size": 2}, ("fp32", "bf16 with fp32 masters"), (2, 4)),
    "Muon": (Trainable, muon, {"reduce_scatter": False}, ("fp32",), (1, 2)),
}


def same(layout: str, precision: str) -> int:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    make, optimizer, zero, _, _ = LAYOUTS[layout]
    # Stock of 0.19.7 would go on with NaNs.
    skips = INVALID_NORM.mended(DeepSpeedZeroOptimizer_Stage3)
    runs = []
    for stock in (True, False):
        model = make()
        engine = build(
            model,
            stock=stock,
            optimizer=optimizer(model) if optimizer else None,
            zero=zero,
            gradient_clipping=0.5,
            **PRECISIONS[precision],
        )
        losses, norms = [], []
        for step in range(STEPS):
            loss = engine(batch_of(engine, step), step)
            if step == 2 and skips:
                loss = loss * float("nan")
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(norm_of(engine))
        runs.append((losses, norms, tensors_of(engine.optimizer)))
    stock_losses, stock_norms, stock_tensors = runs[0]
    losses, norms, tensors = runs[1]
    assert str(losses) == str(stock_losses)
    assert str(norms) == str(stock_norms)
    assert len(set(losses)) == STEPS
    assert_equal_bits(tensors, stock_tensors)
    return len(engine.optimizer.aliased_sub_groups())


CASES = [
    # Muon compiles its own arithmetic.
    pytest.param(layout, precision, world_size, marks=[pytest.mark.slow] * (layout == "Muon"))
    for layout, (*_, precisions, sizes) in LAYOUTS.items()
    for precision, world_size in itertools.product(precisions, sizes)
]


@pytest.mark.parametrize(("layout", "precision", "world_size"), CASES)
def test_a_layout_has_stocks_bits(ranks, layout, precision, world_size):
    for aliased in ranks(world_size).run(same, layout, precision):
        assert bool(aliased) is (precision != "bf16 with fp32 masters")


def after_hpzero() -> None:
    """DeepSpeed keeps hpZeRO's process group, so that later engines have secondary partitions too."""
    first = build(zero={"zero_hpz_partition_size": 2})
    first.backward(first(batch_of(first, 0), 0))
    first.step()
    assert same("all persistent", "fp32") > 0


def test_an_engine_after_one_with_hpzero(ranks):
    ranks(2).run(after_hpzero)


def scaled() -> tuple[int, list[float], list[float]]:
    """Autocast to fp16, where DeepSpeed scales the loss with torch's GradScaler, overflows included."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    runs = []
    for stock, options in ((True, None), (False, Zero3Options(stock_semantics=True)), (False, None)):
        engine = build(stock=stock, options=options, gradient_clipping=0.5, **autocast)
        scales = []
        for step in range(STEPS):
            # Beyond fp32 at a scale of 65,536, and at half of that.
            engine.backward(engine(batch_of(engine, step), step) * (1e36 if step in (1, 2) else 1.0))
            engine.step()
            scales.append(engine.optimizer.torch_autocast_gradscaler.get_scale())
        runs.append((engine.module.losses, scales, tensors_of(engine.optimizer)))
    assert runs[0][:2] == runs[1][:2]
    assert_equal_bits(runs[0][2], runs[1][2])
    return len(engine.optimizer.aliased_sub_groups()), runs[0][1], runs[2][1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_scaler_of_autocast_to_fp16(ranks, world_size):
    for aliased, stock, ours in ranks(world_size).run(scaled):
        assert aliased > 0
        # Two overflows: the scale is halved at each, also where upstream leaves it as it was (0.19.8).
        assert ours[1] <= ours[0] / 2
        assert ours[2] <= ours[1] / 2
        assert ours[3] == ours[2]
        if stock[1] < stock[0]:
            assert ours == stock
