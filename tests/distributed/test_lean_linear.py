# SPDX-License-Identifier: Apache-2.0
"""Linear layers with a leaner function: stock's bits whatever they are given, and nothing left behind."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.config import Zero3Options
from lightning_zero3.substitution import substituted
from tests.distributed.test_lean_hooks import STEPS, WIDTH
from tests.engines import PRECISIONS, build
from tests.fits import Pairs, Regression, assert_equal_bits, fit, tensors_of


class Scaled(nn.Linear):
    """Has a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 0.5


class Subclass(nn.Linear):
    """Has its parent's forward."""


class Layers(nn.Module):
    """Linear layers in every way of calling one."""

    def __init__(self, gathered: torch.dtype) -> None:
        super().__init__()
        self.gathered = gathered
        self.plain, self.bare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scaled, self.subclass = Scaled(WIDTH, WIDTH), Subclass(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.other_forward = nn.Linear(WIDTH, WIDTH)
        self.other_forward.forward = lambda x: nn.functional.linear(x, self.other_forward.weight)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, three = self.bare(x[0]), self.plain(x[None, :, :])[0]
        x = self.plain(x) + self.bare(input=x) + one + three
        x = self.scaled(x) + self.subclass(x) + self.frozen(x) + self.other_forward(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = self.plain(x)
            with torch.autocast("cpu", enabled=False):
                x = x + self.bare(x.to(self.gathered))
        return (self.plain(x) + half).square().mean()


def trained(lean: bool, precision: str) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    torch.manual_seed(2)
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    engine = build(
        Layers(dtype),
        stock=not lean,
        options=Zero3Options(lean_hooks=False, lean_linear=lean),
        **PRECISIONS[precision],
    )
    changed = {name for name, layer in engine.module.named_modules() if "forward" in vars(layer)}
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(x)
        if step % 2:
            # Backward within autocast isn't torch's advice, and is done.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                engine.backward(loss)
        else:
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    tensors = tensors_of(engine.optimizer)
    engine.destroy()
    left = {name for name, layer in engine.module.named_modules() if "forward" in vars(layer)}
    assert left == {"other_forward"}
    return losses, tensors, changed


def against_stock() -> None:
    for precision in ("fp32", "bf16 with fp32 masters", "autocast"):
        stock, ours = trained(False, precision), trained(True, precision)
        assert len(set(stock[0])) == STEPS
        assert ours[0] == stock[0], precision
        assert_equal_bits(ours[1], stock[1])
        assert stock[2] == {"other_forward"}
        assert ours[2] == {"other_forward", "plain", "bare", "subclass", "frozen"}


def test_every_call_of_a_linear_layer_has_stocks_bits(ranks):
    ranks(1).run(against_stock)


def make_gathered(layer: nn.Linear) -> nn.Linear:
    """As an engine's layer is when it's called."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in layer.parameters():
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    return layer


def copies() -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    from lightning_zero3.optimizer.linear_function import is_torchs, make_lean, make_upstreams

    layer, parametrized = nn.Linear(3, 2), parametrizations.weight_norm(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = layer(x), parametrized(x)
    assert make_lean(layer)
    assert make_lean(parametrized)
    assert not make_lean(layer)
    with substituted(nn.functional, "linear", zero3_linear_wrap):
        # Weights that no engine has partitioned, and such as are made anew in each call.
        assert torch.equal(layer(x), expected[0])
        assert torch.equal(parametrized(x), expected[1])
    twin, read = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    assert twin.forward.__self__ is twin
    assert read.forward.__self__ is read
    assert torch.equal(read(x), expected[0])
    torchs = nn.Linear.forward
    gathered = make_gathered(copy.deepcopy(layer))
    with substituted(nn.Linear, "forward", lambda self, input: torchs(self, input) + 1):
        assert torch.equal(layer(x), expected[0] + 1)
        with substituted(nn.functional, "linear", zero3_linear_wrap):
            assert torch.equal(gathered(x), expected[0] + 1)
        assert not make_lean(nn.Linear(3, 2))
        assert not is_torchs(functools.wraps(torchs)(nn.Linear.forward))
        assert is_torchs(torchs)
    with substituted(nn.functional, "linear", zero3_linear_wrap):
        own_function = gathered(x).grad_fn.name()
        with pytest.raises(RuntimeError, match="can't be gathered under a transform"):
            torch.func.grad(lambda value: gathered(value).sum())(x)  # DeepSpeed's own ends the process
    assert own_function != layer(x).grad_fn.name(), "the leaner function isn't called at all"
    own: Any = layer.forward
    layer.forward = lambda x: own(x) * 2  # somebody else's, over ours
    make_upstreams(layer)
    assert torch.equal(layer(x), 2 * expected[0])
    make_upstreams(parametrized)
    assert "forward" not in vars(parametrized)


def test_copies_of_a_layer_are_their_own(ranks):
    ranks(1).run(copies)


class Transformed(Regression):
    """Tries a transform of torch.func around a part of itself, and goes on without."""

    def __init__(self, transform: str = "") -> None:
        super().__init__()
        self.inner, self.transform = nn.Sequential(nn.Linear(13, 13), nn.Tanh()), transform

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        tried = {
            "grad": lambda: torch.func.grad(lambda value: self.inner(value).sum())(x),
            "vmap": lambda: torch.func.vmap(self.inner)(x),
            "jvp": lambda: torch.func.jvp(self.inner, (x,), (x,)),
        }
        if self.transform:
            with pytest.raises(RuntimeError, match="can't be gathered under a transform"):
                tried[self.transform]()
        return super().training_step([self.inner(x), y], batch_idx)


def transformed() -> list[list[float]]:
    losses = []
    for transform in ("", "grad", "vmap", "jvp"):
        torch.manual_seed(0)
        module = Transformed(transform)
        fit(module, Pairs(), Zero3FastStrategy())
        losses.append(module.losses)
    return losses


def test_transforms_of_torch_func_are_refused_before_they_break_weights(ranks):
    """With DeepSpeed's own hooks the first one ends the process."""
    for losses in ranks(2).run(transformed):
        assert losses == [losses[0]] * 4
