# SPDX-License-Identifier: Apache-2.0
"""Routers' correction biases move as one process's would, that sees all tokens of a step and moves them by hand."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe.router import BIAS, NoCorrectionBiasError
from tests.distributed.test_resume import Resumable
from tests.fits import QUIET, Language, Sentences, assert_equal_bits, optimizer_of, tensors_of
from tests.models import build, tiny

SPEED = 0.03
BATCHES = 6
LR = 0.05


class Balanced(Language):
    """Keeps a copy of all biases, and of the counts of the step so far, at the end of each batch."""

    def __init__(self, family: str = "glm", bad: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> None:
        super().__init__(build(tiny(family)).to(dtype))
        self.biases: list[list[torch.Tensor]] = [biases_of(self)]
        self.counts: list[list[int]] = []
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():  # a teacher's forward, or generation: it trains nothing
            self.some_odd_name(input_ids=torch.full((1, 5), batch_idx))
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx in self.bad else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.some_odd_name(**batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.biases.append(biases_of(self))
        self.counts.append(self.trainer.strategy._router_biases.saved_state().tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=LR)


def biases_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer.detach().clone() for name, buffer in module.named_buffers() if name.endswith(BIAS)]


def run(
    strategy: Any,
    module: pl.LightningModule,
    *,
    accumulate: int = 1,
    tensor: int = 1,
    batches: int = BATCHES,
    ckpt_path: str | None = None,
    **options: Any,
) -> Any:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    lanes = world // tensor
    data = Sentences(64, length=2 * lanes * batches)
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "devices": world,
            "max_epochs": 1,
            "accumulate_grad_batches": accumulate,
            "use_distributed_sampler": False,
            "val_check_interval": 1,
            "limit_val_batches": 1,
            **QUIET,
            **options,
        }
    )
    loader = Resumable(data, batch_size=2, sampler=DistributedSampler(data, lanes, rank // tensor, shuffle=False))
    trainer.fit(module, loader, DataLoader(Sentences(64, length=6), batch_size=3), ckpt_path=ckpt_path)
    return trainer


def by_hand(
    family: str, accumulate: int, bad: tuple[int, ...] = (), tensor: int = 1
) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
    """One process on all ranks' tokens, in plain torch: biases and counts at the end of each batch."""
    world = torch.distributed.get_world_size() // tensor
    ids = Sentences(64, length=2 * world * BATCHES).ids
    model = build(tiny(family))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loads: dict[torch.nn.Module, torch.Tensor] = {m: torch.zeros(8) for m in model.modules() if BIAS in m._buffers}

    def count(router: torch.nn.Module, _: Any, output: Any) -> None:
        loads[router] += torch.bincount(output[2].flatten(), minlength=8)

    for router in loads:
        router.register_forward_hook(count)
    seen, counts = [biases_of(model)], []
    for index in range(BATCHES):
        if index not in bad:
            for rank in range(world):
                batch = ids[2 * world * index + rank : 2 * world * (index + 1) : world]
                (model(input_ids=batch, labels=batch).loss / world / accumulate).backward()
        if index not in bad and (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            for router, load in loads.items():
                router._buffers[BIAS] += SPEED * torch.sign(load.mean() - load)
                load.zero_()
        seen.append(biases_of(model))
        # Tensor-parallel peers see the same tokens.
        counts.append((tensor * torch.cat(list(loads.values()))).int().tolist())
    return seen, counts


def compared(
    family: str,
    size: int | None,
    accumulate: int,
    checkpointing: bool | None,
    bad: tuple[int, ...],
    tensor: int | None = None,
) -> Any:
    """Ours beside the reference, at the end of each batch."""
    module = Balanced(family, bad)
    if checkpointing is not None:
        module.some_odd_name.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    strategy = Zero3FastStrategy(expert_parallel_size=size, tensor_parallel_size=tensor, router_bias_update_speed=SPEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(strategy, module, accumulate=accumulate, tensor=tensor or 1)
    expected, counts = by_hand(family, accumulate, bad, tensor or 1)
    assert module.counts == counts
    assert len(module.biases) == len(expected) == BATCHES + 1
    for index, (ours, theirs) in enumerate(zip(module.biases, expected, strict=True)):
        assert len(ours) == len(theirs) == 2
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), (index, layer, (a - b) / SPEED)
    moved = [not torch.equal(a[0], b[0]) for a, b in zip(module.biases, module.biases[1:], strict=False)]
    assert {BIAS not in name for name in module.state_dict()} == {True, False}
    return moved


@pytest.mark.parametrize(
    ("world_size", "family", "size", "accumulate", "checkpointing"),
    [
        (1, "glm", None, 1, None),
        (1, "glm", 1, 3, False),
        (2, "glm", None, 3, True),
        (2, "glm", 1, 1, None),
        (2, "glm", 2, 2, None),
        (2, "glm", 2, 3, False),
        (2, "minimax", None, 1, False),
        (2, "minimax", 2, 2, None),
        pytest.param(4, "glm", 2, 2, None, marks=pytest.mark.slow),
        pytest.param(4, "glm", 4, 1, False, marks=pytest.mark.slow),
        pytest.param(4, "minimax", 4, 2, None, marks=pytest.mark.slow),
    ],
)
def test_biases_move_as_in_one_process(ranks, world_size, family, size, accumulate, checkpointing):
    """Tokens of all ranks and micro-batches count once, those of validation and of recomputed forwards never."""
    for moved in ranks(world_size).run(compared, family, size, accumulate, checkpointing, ()):
        assert moved == [(index + 1) % accumulate == 0 for index in range(BATCHES)]


@pytest.mark.parametrize(("world_size", "size"), [(2, None), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_tensor_parallel_peers_move_alike(ranks, world_size, size):
    for moved in ranks(world_size).run(compared, "glm", size, 2, None, (), 2):
        assert moved == [index % 2 == 1 for index in range(BATCHES)]


@pytest.mark.parametrize("size", [None, 2])
def test_a_skipped_step_moves_nothing_and_its_tokens_are_forgotten(ranks, size):
    for moved in ranks(2).run(compared, "glm", size, 1, None, (1, 3)):
        assert moved == [index not in (1, 3) for index in range(BATCHES)]


class Saving(Balanced):
    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        if self.folder is not None:
            self.trainer.save_checkpoint(f"{self.folder}/{len(self.biases) - 1}")


def resumed(folder: str, size: int | None, accumulate: int) -> dict[str, Any]:
    def strategy() -> Zero3FastStrategy:
        return Zero3FastStrategy(expert_parallel_size=size, router_bias_update_speed=SPEED)

    whole = run(strategy(), Saving(folder), accumulate=accumulate)
    for batch in (1, 3):
        module = Saving(None)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name.endswith(BIAS):
                    buffer.zero_()
        rest = run(strategy(), module, accumulate=accumulate, ckpt_path=f"{folder}/{batch}")
        assert_equal_bits(tensors_of(optimizer_of(rest)), tensors_of(optimizer_of(whole)))
        expected = whole.lightning_module.biases[batch + 1 :]
        assert len(module.biases) == len(expected) + 1
        assert module.counts == whole.lightning_module.counts[batch:], batch
        for ours, theirs in zip(module.biases[1:], expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), batch
    exported = None
    if size is None:
        exported = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{BATCHES}")
        exported = {name: value for name, value in exported.items() if name.endswith(BIAS)}
    return {"exported": exported, "last": whole.lightning_module.biases[-1]}


@pytest.mark.parametrize("size", [None, 2])
def test_a_resume_between_a_steps_micro_batches_has_the_same_bits(ranks, size, tmp_path):
    """Also with a checkpoint's own biases: the module that resumes was built with others."""
    for seen in ranks(2).run(resumed, str(tmp_path), size, 3):
        if size is None:
            assert list(seen["exported"]) == [f"some_odd_name.model.layers.{n}.mlp.gate.{BIAS}" for n in (1, 2)]
            assert all(map(torch.equal, seen["exported"].values(), seen["last"]))


def in_16_bits(precision: str, size: int | None, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    module = Balanced("minimax", dtype=dtype)
    strategy = Zero3FastStrategy(config, expert_parallel_size=size, router_bias_update_speed=2**-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(strategy, module, precision=precision, limit_val_batches=0)
    after = [torch.stack(layers) for layers in zip(*module.biases[1:], strict=True)]
    return {"dtypes": {layer.dtype for layer in after}, "moves": torch.cat([layer.diff(dim=0) for layer in after])}


@pytest.mark.parametrize(
    ("precision", "size", "config", "dtype"),
    [
        ("bf16-mixed", 2, {}, torch.float32),
        ("bf16-true", None, {}, torch.float32),
        # Loaded in 16 bits with all its buffers, or cast by DeepSpeed.
        ("bf16-true", None, {}, torch.bfloat16),
        ("bf16-mixed", 2, {"data_types": {"buffer_dtype": "bf16"}}, torch.float32),
    ],
)
def test_biases_are_fp32_in_16_bit_training(ranks, precision, size, config, dtype):
    """2^-12 beside a half is lost in bf16."""
    config = {"zero_optimization": {"stage": 3}, **config}
    for seen in ranks(2).run(in_16_bits, precision, size, config, dtype):
        assert seen["dtypes"] == {torch.float32}
        assert set((seen["moves"] * 2**12).flatten().tolist()) <= {-1.0, 0.0, 1.0}
        assert seen["moves"].any()


def of_frozen_and_stock() -> dict[str, Any]:
    """The first MoE layer and all below it frozen; stock's accumulation, in which the engine decides."""
    frozen = Balanced()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".layers.2." in name or "lm_head" in name)
    stock = Balanced()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(Zero3FastStrategy(router_bias_update_speed=SPEED), frozen, batches=2)
        strategy = Zero3FastStrategy(router_bias_update_speed=SPEED, stock_semantics=True)
        run(strategy, stock, accumulate=2)
    return {
        "frozen": [torch.equal(a, b) for a, b in zip(frozen.biases[0], frozen.biases[-1], strict=True)],
        "stock": [not torch.equal(a[0], b[0]) for a, b in zip(stock.biases, stock.biases[1:], strict=False)],
        "counted": [any(counts) for counts in stock.counts],
        "moves": torch.stack([layers[1] for layers in stock.biases]).diff(dim=0).abs().max().item(),
    }


def test_frozen_layers_keep_their_biases_and_stocks_steps_count(ranks):
    seen = ranks(1).run(of_frozen_and_stock)[0]
    assert seen["frozen"] == [True, False]
    assert seen["stock"] == [False, True] * 3
    assert seen["counted"] == [True, False] * 3
    assert seen["moves"] == pytest.approx(SPEED, rel=1e-4)


def differing() -> list[list[torch.Tensor]]:
    """Ranks whose modules were built with other biases."""
    module = Balanced()
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith(BIAS):
                buffer.add_(rank)
    module.biases = [biases_of(module)]
    run(Zero3FastStrategy(router_bias_update_speed=SPEED), module, batches=1)
    return module.biases


def test_ranks_begin_with_rank_0s_biases(ranks):
    zero, one = ranks(2).run(differing)
    assert not torch.equal(zero[0][0], one[0][0])
    assert all(map(torch.equal, zero[1], one[1]))
    assert all(bool(((a - b).abs() <= 2 * SPEED).all()) for a, b in zip(zero[0], zero[1], strict=True))


class NoChoice(torch.nn.Module):
    """A router that keeps its choice to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer(BIAS, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def silent() -> str:
    module = Balanced()
    module.some_odd_name = torch.nn.Sequential(torch.nn.Embedding(64, 4), NoChoice())
    module.training_step = lambda batch, batch_idx: module.some_odd_name(batch["input_ids"]).sum()
    with pytest.raises(NoCorrectionBiasError) as caught:
        run(Zero3FastStrategy(router_bias_update_speed=SPEED), module, limit_val_batches=0)
    return str(caught.value)


def test_a_router_that_returns_no_choice_is_refused_by_name(ranks):
    assert "some_odd_name.1 (NoChoice) doesn't return the experts" in ranks(1).run(silent)[0]
