# SPDX-License-Identifier: Apache-2.0
"""A fit goes on in another layout of ranks: each number is where it belongs, and losses are the unchanged run's."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints import layout_record, loading
from lightning_zero3.checkpoints.places import UnfitCheckpointError
from lightning_zero3.topology import Topology
from tests.distributed.test_loading import flip, saved, shard, strategy
from tests.distributed.test_loading import refused as refusal
from tests.engines import Trainable, micro_step
from tests.engines import build as build_engine
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build, tiny

BEFORE, AFTER = 2, 3
OFFLOAD = "optimizer on the CPU"
Sizes = tuple[int, int | None, int | None]  # ranks, expert and tensor parallel sizes


class Watch(pl.Callback):
    """Saves after ``BEFORE`` steps; notes what training starts with, and saves and loads it by the engine."""

    def __init__(self, save: str | None = None, save_again: str | None = None, load: str | None = None) -> None:
        self.save, self.save_again, self.load = save, save_again, load
        self.at_start: dict[str, list[torch.Tensor]] = {}
        self.at_save: dict[str, list[torch.Tensor]] = {}
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


def precision_of(setting: str) -> Any:
    return "32-true" if setting == OFFLOAD else setting


def module_of(family: str | None) -> tuple[Any, Any]:
    pl.seed_everything(0, verbose=False)  # the order of samples, in whichever processes
    return (Language(build(tiny(family))), Sentences(64)) if family else (Regression(), Pairs())


def strategy_of(sizes: Sizes, any_layout: bool, setting: str) -> Zero3FastStrategy:
    options: dict[str, Any] = {"resume_layout": "universal"} if any_layout else {}
    if setting == OFFLOAD:
        options["offload_optimizer"] = True
    zero = {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 40}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return Zero3FastStrategy(config, expert_parallel_size=sizes[1], tensor_parallel_size=sizes[2], **options)


def trained(
    folder: str,
    family: str | None,
    sizes: Sizes,
    accumulate: int,
    watch: Watch,
    steps: int,
    resumed: bool,
    setting: str,
) -> list[float]:
    """Losses of each step from the start, or from the resume, over this rank's micro-batches."""
    module, data = module_of(family)
    fit(
        module,
        data,
        strategy_of(sizes, resumed, setting),
        steps=steps,
        ckpt_path=f"{folder}/saved" if resumed else None,
        accumulate_grad_batches=accumulate,
        callbacks=[watch],
        precision=precision_of(setting),
    )
    losses = module.losses
    return [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)]


def first(folder: str, family: str | None, sizes: Sizes, accumulate: int, setting: str) -> list[float]:
    watch = Watch(save=f"{folder}/saved")
    losses = trained(folder, family, sizes, accumulate, watch, BEFORE + AFTER, False, setting)
    torch.save(watch.at_save, f"{folder}/state {torch.distributed.get_rank()}.pt")
    return losses[BEFORE:]


def then(
    folder: str, family: str | None, sizes: Sizes, accumulate: int, setting: str, refused: bool
) -> tuple[list[float], list[str]]:
    if refused:
        module, data = module_of(family)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        with pytest.raises(UnfitCheckpointError, match='resume_layout="universal"'):
            fit(
                module,
                data,
                strategy_of(sizes, False, setting),
                ckpt_path=f"{folder}/saved",
                precision=precision_of(setting),
            )
        if sizes[1] is None and sizes[2] is None:  # else the engine's layers are others
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    watch = Watch(save_again=f"{folder}/again")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = trained(folder, family, sizes, accumulate, watch, BEFORE + AFTER, True, setting)
    return losses, [str(each.message) for each in caught]


def and_back(folder: str, family: str | None, sizes: Sizes, accumulate: int, setting: str) -> None:
    watch = Watch(load=f"{folder}/again")
    module, data = module_of(family)
    fit(module, data, strategy_of(sizes, True, setting), steps=1, callbacks=[watch], precision=precision_of(setting))
    assert_equal_bits(watch.at_start, torch.load(f"{folder}/state {torch.distributed.get_rank()}.pt"))


def mean(per_rank: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*per_rank, strict=True)]


def there_and_back(
    ranks: Any,
    folder: Path,
    family: str | None,
    one: Sizes,
    other: Sizes,
    setting: str = "32-true",
    refused: bool = False,
) -> tuple[list[float], list[float]]:
    """Losses of the unchanged run and of the one that goes on elsewhere, with as many samples in each step."""
    lanes = [sizes[0] // (sizes[2] or 1) for sizes in (one, other)]
    steps = [max(lanes) // each for each in lanes]
    unchanged = mean(ranks(one[0]).run(first, str(folder), family, one, steps[0], setting))
    seen = ranks(other[0]).run(then, str(folder), family, other, steps[1], setting, refused)
    ranks(one[0]).run(and_back, str(folder), family, one, steps[0], setting)
    said = "\n".join(seen[0][1])
    assert "is of another layout, and was read into this one" in said
    assert ("begins anew: random states" in said) is (lanes[0] != lanes[1] or one[0] != other[0])
    return unchanged, mean([losses for losses, _ in seen])


CASES: dict[str, tuple[Any, ...]] = {
    "EP 2 → 1": ("glm", (2, 2, None), (2, 1, None)),
    "TP 2 → 1": ("glm", (2, None, 2), (2, None, None)),
}
SLOW: dict[str, tuple[Any, ...]] = {
    "bf16, 2 → 1": (None, (2, None, None), (1, None, None), "bf16-mixed"),
    "bf16, EP 2 → 1": ("glm", (2, 2, None), (2, 1, None), "bf16-mixed"),
    "bf16, TP 2 → 1": ("glm", (2, None, 2), (2, None, None), "bf16-mixed"),
    "offload, EP 2 → without": ("glm", (2, 2, None), (2, None, None), OFFLOAD),
    "2 → 4": (None, (2, None, None), (4, None, None)),
    "4 → 2": (None, (4, None, None), (2, None, None)),
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
BOUND, BF16_BOUND = 1e-6, 1e-2


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fit_goes_on_in_another_layout(ranks, tmp_path, name):
    unchanged, changed = there_and_back(ranks, tmp_path, *{**CASES, **SLOW}[name], refused=name in CASES)
    assert len(unchanged) == AFTER
    assert changed == pytest.approx(unchanged, rel=BF16_BOUND if name.startswith("bf16") else BOUND)
    print(f"{name}: {max(abs(a - b) / abs(b) for a, b in zip(changed, unchanged, strict=True)):.1e}")


GROUPS: dict[str, Any] = {
    "as it was": lambda p: [{"params": p[:3]}, {"params": p[3:], "weight_decay": 0.1}],
    "in another order": lambda p: [{"params": p[:3][::-1]}, {"params": p[3:], "weight_decay": 0.1}],
    "groups in another order": lambda p: [{"params": p[3:], "weight_decay": 0.1}, {"params": p[:3]}],
    "moved to another group": lambda p: [{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.1}],
}


def grouped(kind: str, stock: bool = False) -> Any:
    """One sub-group for each parameter, so that sub-groups tell nothing of groups."""
    model = Trainable((13, 13, 13, 7))
    optimizer = torch.optim.AdamW(GROUPS[kind](list(model.parameters())), lr=1e-2, weight_decay=0.0)
    return build_engine(model, stock=stock, optimizer=optimizer, sub_group_size=1)


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    states = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        states[f"moment of {name}"] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    return states


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def reordered(folder: str) -> tuple[bool, dict[str, str]]:
    """Whether stock loads wrong weights without a word, and what ours says; by name, all is right to the bit."""
    layout = Topology(torch.distributed.get_world_size())
    unchanged = grouped("as it was")
    for step in range(2):
        micro_step(unchanged, step)
    unchanged.save_checkpoint(folder, tag="two")  # without a record of the layout, as stock's
    saved = full_state(unchanged)
    stock = grouped("in another order", stock=True)
    stock.load_checkpoint(folder, tag="two")
    wrong = not equal(full_state(stock), saved)
    said = {}
    micro_step(unchanged, 2)
    for kind in GROUPS:
        engine = grouped(kind)
        micro_step(engine, 0)  # so that there is something to lose
        loading.guard(engine, layout, trust=False)
        if kind != "as it was":
            said[kind] = refusal(engine, folder, tag="two")
        loading.guard(engine, layout, trust=False, any_layout=True)
        if kind == "moved to another group":
            said["moved, by name"] = refusal(engine, folder, tag="two")
            continue
        engine.load_checkpoint(folder, tag="two")
        assert equal(full_state(engine), saved), kind
        micro_step(engine, 2)
        assert equal(full_state(engine), full_state(unchanged)), kind
    return wrong, said


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_parameters_in_another_order_or_group(ranks, tmp_path, world_size):
    for wrong, said in ranks(world_size).run(reordered, str(tmp_path)):
        assert wrong
        assert set(said) == {*GROUPS, "moved, by name"} - {"as it was"}
        assert "can't be one here" in said["moved, by name"]
        for message in said.values():
            assert message.startswith("UnfitCheckpointError")
        assert 'resume_layout="universal"' in said["in another order"]
        assert 'resume_layout="universal"' in said["groups in another order"]
        assert "have other members" in said["moved to another group"]


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def of_rank_1(change: Callable[[dict[str, Any]], None], kind: str = "model") -> Callable[[Path], None]:
    return lambda folder: edited(shard(folder, 1, kind), change)


def without_states(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["optimizer_state_dict"] = None


def another_range(start: int, stop: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        ranges = content[layout_record.SAVED]["ranges"]
        ranges["net.0.weight"] = (*ranges["net.0.weight"][:4], start, stop, ranges["net.0.weight"][6])

    return change


# net.0.weight has 31 × 13 elements, 202 on each of two ranks.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is missing": (
        lambda folder: shard(folder, 1).unlink(),
        "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",
    ),
    "a bit": (lambda folder: flip(shard(folder, 1)), "zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged"),
    "a range beyond the tensor": (of_rank_1(another_range(202, 404)), "isn't laid out"),
    "the same range twice": (of_rank_1(another_range(0, 202)), "holds 202 of the 403 elements of net.0.weight"),
    "no names": (of_rank_1(lambda c: c[layout_record.SAVED]["ranges"].clear()), "its record of the layout lacks"),
    "not known": (of_rank_1(lambda c: c.update({layout_record.SAVED: {"unknown": "sliced oddly"}})), "sliced oddly"),
    "weights only": (of_rank_1(without_states, "optim"), "holds weights only"),
}


def broken(folder: str) -> dict[str, str]:
    engine = fit(Regression(), Pairs(), strategy(resume_layout="universal"), steps=1).strategy.model
    said = {}
    for name, (change, _) in BROKEN.items():
        shutil.copytree(folder, f"{folder} {name}")
        change(Path(f"{folder} {name}"))
        said[name] = refusal(engine, f"{folder} {name}")
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    return said


def of_two(folder: str) -> None:
    saved(folder)


def test_broken_files_of_another_layout_are_refused(ranks, tmp_path):
    folder = str(tmp_path / "saved")
    ranks(2).run(of_two, folder)
    for name, message in ranks(1).run(broken, folder)[0].items():
        assert BROKEN[name][1] in message, (name, message)
