# SPDX-License-Identifier: Apache-2.0
"""What a fit says in the terminal: the table at its end, and the line about an allocation that fails."""

import contextlib
import io
import logging
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.metrics import out_of_memory
from lightning_zero3.metrics.memory_parts import memory_by_part
from tests.fits import Pairs, Regression, fit

# More than any machine's address space: the CPU's allocator refuses it.
TOO_MUCH = 2**48


def printed_at_the_end(summary: bool) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fit(Regression(), Pairs(), "zero3_fast", callbacks=[Zero3Monitor(summary=summary, run_name="[a run]")])
    return printed.getvalue()


def test_a_table_at_the_end_on_rank_0_unless_switched_off(ranks):
    first, second = ranks(2).run(printed_at_the_end, True)
    assert "[a run]" in first
    assert "step_microstep, after step 1 (ms)" in first
    assert "5 optimizer steps logged" in first
    assert "5 optimizer steps logged" not in second
    assert "optimizer steps logged" not in ranks(1).run(printed_at_the_end, False)[0]


def allocate() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        allocate()
        return gradient


class GreedyAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        allocate()


class Greedy(Regression):
    """Asks for too much in one phase, in the second batch or as soon as the phase comes."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.phase == out_of_memory.FORWARD and batch_idx == 1:
            allocate()
        loss = super().training_step(batch, batch_idx)
        return InBackward.apply(loss) if self.phase == out_of_memory.BACKWARD and batch_idx == 1 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.phase == out_of_memory.VALIDATION:
            allocate()

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Pairs(length=8), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.phase == out_of_memory.SET_UP:
            allocate()
        if self.phase == out_of_memory.STEP:
            return GreedyAdamW(self.parameters(), lr=1e-3)
        return super().configure_optimizers()


def failing(phase: str, strategy: str) -> tuple[list[str], str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(out_of_memory.__name__)
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            fit(
                Greedy(phase),
                Pairs(),
                strategy,
                callbacks=[Zero3Monitor()],
                num_sanity_val_steps=0,
                val_check_interval=2,
            )
    finally:
        logger.removeHandler(handler)
    return lines, str(caught.value)


PHASES = list(out_of_memory.REMEDIES)
UNREACHED = {out_of_memory.AFTER_BACKWARD, out_of_memory.BETWEEN}  # nothing here allocates in them


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in UNREACHED])
def test_an_allocation_that_fails_is_explained_by_one_line_and_raised(ranks, phase):
    ((line,), error) = ranks(1).run(failing, phase, "zero3_fast")[0]
    assert f"rank 0 (host memory) in {phase} after " in line
    assert "262,144.00 GiB was asked for" in line
    assert f"What helps: {out_of_memory.REMEDIES[phase]}" in line
    assert str(TOO_MUCH) in error
    for part in ("weights ", "masters ", "optimizer states ", "buckets ", "gradients ", "rest "):
        assert f" {part}" in line
    assert "\n" not in line


def test_any_strategy_has_the_line(ranks):
    ((line,), _) = ranks(1).run(failing, out_of_memory.FORWARD, "auto")[0]
    assert "in forward after 1 optimizer steps" in line


def parts() -> tuple[dict[str, int], int, int]:
    # A bucket that isn't written to is no resident memory, so a small one.
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(reduce_bucket_size=10_000))
    engine = trainer.strategy.model
    numel = sum(parameter.ds_numel for parameter in engine.parameters())
    bucket = sum(bucket.buffer.nbytes for bucket in engine.optimizer.ipg_buckets.values())
    return memory_by_part(engine, trainer.strategy.optimizers, torch.device("cpu")), numel, bucket


def test_parts_are_the_bytes_of_the_engines_tensors(ranks):
    found, numel, bucket = ranks(1).run(parts)[0]
    assert found["weights"] == 4 * numel
    assert found["masters"] == 0  # they are the weights
    # Two moments, and a step count for each sub-group.
    assert 0 <= found["optimizer states"] - 8 * numel <= 64
    assert found["gradients"] == 4 * numel
    assert found["buckets"] == bucket
    assert found["rest"] > 50 * 2**20  # Python, torch, DeepSpeed
    assert 0 <= found["gathered weights"] <= 4 * numel
