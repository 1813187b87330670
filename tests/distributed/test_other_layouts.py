"""A fit goes on in another layout of ranks: every number arrives where it belongs, and losses are the unchanged run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build, tiny

BEFORE, AFTER = 2, 3
Sizes = tuple[int, int | None, int | None]  # ranks, expert and tensor parallel sizes


class Watch(pl.Callback):
    """Saves after ``BEFORE`` steps; notes what training starts with, and saves and loads it by the engine."""

    def __init__(self, save: str | None = None, save_again: str | None = None, load: str | None = None) -> None:
        self.save, self.save_again, self.load = save, save_again, load
        self.at_start: dict[str, list[torch.Tensor]] = {}
        self.at_save: dict[str, list[torch.Tensor]] = {}
        self.micro_batches = 0
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.model
        if self.load:
            engine.load_checkpoint(self.load, tag="again")
        self.at_start = tensors_of(engine.optimizer)
        if self.save_again:
            engine.save_checkpoint(self.save_again, tag="again")

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == BEFORE and self.save and not self.at_save:
            self.at_save = tensors_of(optimizer_of(trainer))
            trainer.save_checkpoint(self.save)


def module_of(family: str | None) -> tuple[Any, Any]:
    return (Language(build(tiny(family))), Sentences(64)) if family else (Regression(), Pairs())


def strategy_of(sizes: Sizes, any_layout: bool, **options: Any) -> Zero3FastStrategy:
    layout = {"resume_layout": "universal"} if any_layout else {}
    zero = {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 40}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return Zero3FastStrategy(
        config, expert_parallel_size=sizes[1], tensor_parallel_size=sizes[2], **layout, **options
    )


def trained(
    folder: str, family: str | None, sizes: Sizes, accumulate: int, watch: Watch, steps: int, resumed: bool, precision: str
) -> list[float]:
    """Losses of each step from the start, or from the resume, over this rank's micro-batches."""
    module, data = module_of(family)
    fit(
        module,
        data,
        strategy_of(sizes, resumed),
        steps=steps,
        ckpt_path=f"{folder}/saved" if resumed else None,
        accumulate_grad_batches=accumulate,
        callbacks=[watch],
        precision=precision,
    )
    losses = module.losses
    return [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)]


def first(folder: str, family: str | None, sizes: Sizes, accumulate: int, precision: str) -> list[float]:
    watch = Watch(save=f"{folder}/saved")
    losses = trained(folder, family, sizes, accumulate, watch, BEFORE + AFTER, False, precision)
    torch.save(watch.at_save, f"{folder}/state {torch.distributed.get_rank()}.pt")
    return losses[BEFORE:]


def then(folder: str, family: str | None, sizes: Sizes, accumulate: int, precision: str) -> list[float]:
    watch = Watch(save_again=f"{folder}/again")
    return trained(folder, family, sizes, accumulate, watch, BEFORE + AFTER, True, precision)


def and_back(folder: str, family: str | None, sizes: Sizes, accumulate: int, precision: str) -> None:
    watch = Watch(load=f"{folder}/again")
    module, data = module_of(family)
    fit(module, data, strategy_of(sizes, True), steps=1, callbacks=[watch], precision=precision)
    assert_equal_bits(watch.at_start, torch.load(f"{folder}/state {torch.distributed.get_rank()}.pt"))


def mean(per_rank: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*per_rank, strict=True)]


def there_and_back(
    ranks: Any, folder: Path, family: str | None, one: Sizes, other: Sizes, precision: str = "32-true"
) -> tuple[list[float], list[float]]:
    """Losses of the unchanged run and of the one that goes on elsewhere, with as many samples in each step."""
    lanes = [sizes[0] // (sizes[2] or 1) for sizes in (one, other)]
    steps = [max(lanes) // each for each in lanes]
    unchanged = mean(ranks(one[0]).run(first, str(folder), family, one, steps[0], precision))
    changed = mean(ranks(other[0]).run(then, str(folder), family, other, steps[1], precision))
    ranks(one[0]).run(and_back, str(folder), family, one, steps[0], precision)
    return unchanged, changed


CASES: dict[str, tuple[str | None, Sizes, Sizes]] = {
    "4 → 2": (None, (4, None, None), (2, None, None)),
    "EP 2 → 1": ("glm", (2, 2, None), (2, 1, None)),
    "TP 2 → 1": ("glm", (2, None, 2), (2, None, None)),
}
SLOW: dict[str, tuple[str | None, Sizes, Sizes]] = {
    "2 → 4": (None, (2, None, None), (4, None, None)),
    "2 → 1": (None, (2, None, None), (1, None, None)),
    **{
        f"{family}, {name}": (family, one, other)
        for family in ("glm", "qwen3_5", "mixtral", "minimax")
        for name, one, other in (
            ("EP 2 → 4", (4, 2, None), (4, 4, None)),
            ("EP 2 → 1", (2, 2, None), (2, 1, None)),
            ("EP 2 → without", (2, 2, None), (2, None, None)),
            ("without → EP 2", (2, None, None), (2, 2, None)),
            ("EP 2 on 4 → EP 2 on 2", (4, 2, None), (2, 2, None)),
            ("EP 2 → 1 rank without", (2, 2, None), (1, None, None)),
            ("TP 2 → 1", (2, None, 2), (2, None, None)),
            ("TP 2 → 1 rank", (2, None, 2), (1, None, None)),
            ("1 → TP 2", (2, None, None), (2, None, 2)),
            ("EP 2 and TP 2 → EP 2", (2, 2, 2), (2, 2, None)),
            ("EP 2 and TP 2 on 4 → 2 without", (4, 2, 2), (2, None, None)),
        )
    },
}
BOUND = 1e-5


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fit_goes_on_in_another_layout(ranks, tmp_path, name):
    unchanged, changed = there_and_back(ranks, tmp_path, *{**CASES, **SLOW}[name])
    assert len(unchanged) == AFTER
    assert changed == pytest.approx(unchanged, rel=BOUND)
    print(f"{name}: {max(abs(a - b) / abs(b) for a, b in zip(changed, unchanged, strict=True)):.1e}")
