# SPDX-License-Identifier: Apache-2.0
"""What is loaded is what was asked for, whole, and runs nothing; all is looked at before anything is changed."""

import copy
import functools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints import manifest
from lightning_zero3.checkpoints.places import UnfitCheckpointError
from tests.distributed.stock import StockOnCPU
from tests.fits import QUIET, Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of

ZERO = {"stage": 3, "stage3_param_persistence_threshold": 40, "sub_group_size": 300}


def strategy(**options: Any) -> Zero3FastStrategy:
    return Zero3FastStrategy({"zero_optimization": dict(ZERO)}, **options)


def on_rank_0(work: Callable[[], Any]) -> None:
    if torch.distributed.get_rank() == 0:
        work()
    torch.distributed.barrier()


def saved(folder: str, steps: int = 2, module: Any = None, stock: bool = False) -> Any:
    """A run that has saved ``folder``, without a manifest."""
    how = StockOnCPU(config={"zero_optimization": dict(ZERO)}) if stock else strategy()
    trainer = fit(module or Regression(), Pairs(), how, steps=steps)
    trainer.save_checkpoint(folder)
    on_rank_0(lambda: Path(folder, manifest.MANIFEST).unlink(missing_ok=True))
    return trainer


def shard(folder: Path, rank: int, kind: str = "optim") -> Path:
    return folder / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 700)


def flip(path: Path) -> None:
    """One bit, in the middle of a tensor: torch itself reads it without a word."""
    content = bytearray(path.read_bytes())
    value = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
    position = content.find(value.detach().numpy().tobytes())
    assert position > 0
    content[position + 5] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=False)


def copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


# Each gets the checkpoint, a later one of the same run, and one of another model; and the name that is to be told.
DAMAGES: dict[str, tuple[Callable[[Path, Path, Path], None], str]] = {
    "optimizer file cut short": (lambda here, later, other: truncate(shard(here, 1)), "zero_pp_rank_1"),
    "model file cut short": (lambda here, later, other: truncate(shard(here, 0, "model")), "zero_pp_rank_0"),
    "empty": (lambda here, later, other: shard(here, 1).write_bytes(b""), "zero_pp_rank_1"),
    "a bit": (lambda here, later, other: flip(shard(here, 0)), "zero_pp_rank_0"),
    "missing": (lambda here, later, other: shard(here, 1).unlink(), "zero_pp_rank_1"),
    "model file missing": (lambda here, later, other: shard(here, 1, "model").unlink(), "zero_pp_rank_1"),
    "another rank's": (lambda here, later, other: copied(shard(here, 0), shard(here, 1)), "zero_pp_rank_1"),
    "optimizer of another step": (lambda here, later, other: copied(shard(later, 1), shard(here, 1)), "zero_pp_rank_1"),
    "model of another step": (
        lambda here, later, other: copied(shard(later, 1, "model"), shard(here, 1, "model")),
        "zero_pp_rank_1",
    ),
    "another model's optimizer": (lambda here, later, other: copied(shard(other, 0), shard(here, 0)), "zero_pp_rank_0"),
    "another model's": (
        lambda here, later, other: [
            copied(shard(other, rank, kind), shard(here, rank, kind)) for rank in (0, 1) for kind in ("model", "optim")
        ],
        "zero_pp_rank_",
    ),
}


def state_of(engine: Any) -> tuple[Any, ...]:
    counters = engine.global_steps, engine.skipped_steps, engine.global_samples, engine.optimizer.loss_scale
    return counters, [buffer.clone() for buffer in engine.module.buffers()], tensors_of(engine.optimizer)


def refused(engine: Any, folder: Any, **arguments: Any) -> str:
    """What a load says; nothing of the engine has moved."""
    counters, buffers, tensors = state_of(engine)
    with pytest.raises(RuntimeError) as caught:
        engine.load_checkpoint(folder, **arguments)
    counters_after, buffers_after, tensors_after = state_of(engine)
    assert counters == counters_after
    assert all(torch.equal(a, b) for a, b in zip(buffers, buffers_after, strict=True))
    assert_equal_bits(tensors, tensors_after)
    return f"{type(caught.value).__name__}: {caught.value}"


def damages(folder: str, stock: bool) -> dict[str, tuple[str, ...]]:
    root = Path(folder)
    first = saved(f"{root}/whole", stock=stock)
    before = tensors_of(optimizer_of(first))
    saved(f"{root}/later", steps=4, stock=stock)
    saved(f"{root}/other", module=Regression((13, 29, 7)), stock=stock)
    engine = fit(Regression(), Pairs(), strategy(), steps=1).strategy.model
    said = {}

    def prepare(name: str, listed: bool) -> None:
        shutil.rmtree(root / "now", ignore_errors=True)
        shutil.copytree(root / "whole", root / "now")
        if listed:
            names = [path.relative_to(root / "now").as_posix() for path in (root / "now").rglob("*") if path.is_file()]
            files = {each: manifest.measure(root / "now" / each) for each in names}
            manifest.write(root / "now", manifest.Manifest("checkpoint", {"ranks": 2}, files=files))
        if name:
            DAMAGES[name][0](root / "now", root / "later", root / "other")

    for name in DAMAGES:
        # Ours may be written by way of memory, and don't hold their names then; a manifest tells.
        if stock or name != "another rank's":
            on_rank_0(lambda name=name: prepare(name, listed=False))
            said[name] = (
                refused(engine, root / "now"),
                refused(engine, root / "now", load_module_only=True),
            )
        on_rank_0(lambda name=name: prepare(name, listed=True))
        said[f"{name}, with a manifest"] = (refused(engine, root / "now"),)
    for listed in (False, True):
        on_rank_0(lambda listed=listed: prepare("", listed))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load_checkpoint(root / "now")
        assert_equal_bits(tensors_of(engine.optimizer), before)
        unverified = [each for each in caught if "unverified" in str(each.message)]
        assert len(unverified) == (0 if listed or torch.distributed.get_rank() else 1)
    return said


@pytest.mark.parametrize("stock", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_files_that_are_not_what_was_saved_are_refused_by_name_on_every_rank(ranks, tmp_path, stock):
    for said in ranks(2).run(damages, str(tmp_path), stock):
        for name, messages in said.items():
            for message in messages:
                assert DAMAGES[name.removesuffix(", with a manifest")][1] in message, (name, message)
                assert message.startswith(("DamagedCheckpointError", "UnfitCheckpointError")), (name, message)


def of_one_rank(folder: str) -> None:
    saved(folder)


def of_two(folder: str) -> str:
    return refused(fit(Regression(), Pairs(), strategy(), steps=1).strategy.model, folder)


def test_another_number_of_ranks_is_refused_before_anything_is_loaded(ranks, tmp_path):
    ranks(1).run(of_one_rank, str(tmp_path))
    for message in ranks(2).run(of_two, str(tmp_path)):
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt is missing" in message or "saved by 1" in message


class Frozen(Regression):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.kept = torch.nn.Parameter(torch.full((5,), value), requires_grad=False)


class Runs:
    """An object that calls ``os.system`` while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Valid(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def changes_of(content: dict[str, Any], inner: tuple[str, ...]) -> dict[str, Any]:
    """A file's content less each of its entries, and with something else in their place."""
    level, found = content, {}
    for depth in range(len(inner) + 1):
        for name in level:
            for how in ("gone", 3, None, [], {}):
                changed = copy.deepcopy(content)
                at = functools.reduce(lambda held, key: held[key], inner[:depth], changed)
                at.pop(name) if how == "gone" else at.update({name: how})
                found[f"{'.'.join((*inner[:depth], name))}: {how}"] = changed
        level = level[inner[depth]] if depth < len(inner) else level
    return found


def laid_out_otherwise(folder: str) -> dict[str, str]:
    """Every entry of DeepSpeed's missing, or something else: loads that are refused, all before anything has moved."""
    root, said = Path(folder), {}
    saved(f"{root}/whole", module=Frozen())
    engine = fit(Frozen(2.0), Pairs(), strategy(), steps=1).strategy.model
    shutil.copytree(root / "whole", root / "now")
    for kind, inner in (("model", ()), ("optim", ("optimizer_state_dict", "optimizer_state_dict"))):
        path = shard(root / "now", 0, kind)
        content = torch.load(path, weights_only=False)
        for name, changed in changes_of(content, inner).items():
            torch.save(changed, path)
            for arguments in ({}, {"load_module_only": True}):
                before = state_of(engine)
                try:
                    engine.load_checkpoint(root / "now", **arguments)
                except (manifest.DamagedCheckpointError, UnfitCheckpointError) as error:
                    said[f"{name} {arguments}"] = str(error)
                    after = state_of(engine)
                    assert before[0] == after[0], name
                    assert_equal_bits(before[2], after[2])
        torch.save(content, path)
    torch.save({**content, "optimizer_state_dict": {**content["optimizer_state_dict"]}}, path)
    del content["optimizer_state_dict"]["optimizer_state_dict"]
    torch.save(content, path)
    said["weights only"] = refused(engine, root / "now")
    engine.load_checkpoint(root / "now", load_module_only=True)
    return said


def test_files_that_are_laid_out_otherwise_are_refused_or_load(ranks, tmp_path):
    (said,) = ranks(1).run(laid_out_otherwise, str(tmp_path))
    assert "holds weights only" in said["weights only"]
    assert len(said) > 60
    for name, message in said.items():
        assert "zero_pp_rank_0_mp_rank_00_" in message, (name, message)


def universal(folder: str) -> list[str]:
    from deepspeed.checkpoint import ds_to_universal

    from lightning_zero3.checkpoints.loading import guard
    from lightning_zero3.topology import Topology
    from tests.distributed.test_checkpoint import _parsed
    from tests.engines import build, micro_step

    root, engine = Path(folder), build()
    micro_step(engine, 0)
    engine.save_checkpoint(folder, tag="one")
    arguments = ["--input_folder", f"{folder}/one", "--output_folder", f"{folder}/universal"]
    ds_to_universal.main(_parsed(ds_to_universal, arguments))
    (root / "latest_universal").write_text("universal")
    other = build(checkpoint={"load_universal": True})
    guard(other, Topology(1), trust=False)
    micro_step(other, 1)
    said = []
    path = next((root / "universal" / "zero").rglob("exp_avg.pt"))
    content = path.read_bytes()
    torch.save({"param": torch.load(path), "more": Runs(root / "ran")}, path)
    said.append(refused(other, folder))
    path.write_bytes(content[:-200])
    said.append(refused(other, folder))
    path.write_bytes(content)
    other.load_checkpoint(folder)
    assert_equal_bits(
        {name: tensors_of(other.optimizer)[name] for name in ("weights", "masters")},
        {name: tensors_of(engine.optimizer)[name] for name in ("weights", "masters")},
    )
    assert not (root / "ran").exists()
    return said


def test_a_universal_checkpoint_is_looked_at_too(ranks, tmp_path):
    ((untrusted, damaged),) = ranks(1).run(universal, str(tmp_path))
    assert "exp_avg.pt holds posix.system" in untrusted
    assert "exp_avg.pt is damaged" in damaged


def tags(folder: str) -> None:
    root = Path(folder)
    engine = fit(Valid(), Pairs(), strategy(), steps=1).strategy.model
    kept = {}
    for tag in ("first", "second", "third"):
        lightnings = (
            {"pytorch-lightning_version": pl.__version__, "loops": None, "lr_schedulers": []} if tag != "third" else {}
        )
        engine.save_checkpoint(folder, tag=tag, client_state=lightnings)
        kept[tag] = tensors_of(engine.optimizer)
        for index in range(2):
            engine.backward(engine.module.training_step([each[:2] for each in (Pairs().x, Pairs().y)], index))
            engine.step()
    assert not torch.equal(kept["first"]["weights"][0], kept["second"]["weights"][0])
    for arguments, tag in (
        ((folder, "first"), "first"),
        ((folder,), "third"),
        ((root / "second",), "second"),
        ((f"{folder}/second/",), "second"),
    ):
        engine.load_checkpoint(*arguments)
        assert_equal_bits(tensors_of(engine.optimizer), kept[tag])
        # Weights and masters alone: moments stay, counters too.
        other = fit(Valid(), Pairs(), strategy(), steps=3).strategy.model
        moments = tensors_of(other.optimizer)["moments"]
        other.load_checkpoint(*arguments, load_module_only=True)
        now = tensors_of(other.optimizer)
        assert_equal_bits({**now, "moments": moments}, {**kept[tag], "moments": moments})
        assert_equal_bits({"moments": now["moments"]}, {"moments": moments})
        assert other.global_steps == 3
        other.load_checkpoint(*arguments, load_optimizer_states=False)
        assert other.global_steps == engine.global_steps
    for path, tag in ((root / "first", "first"), (folder, "third")):
        trainer = pl.Trainer(**QUIET, strategy=strategy(), devices=torch.distributed.get_world_size())
        module = Valid()
        trainer.validate(module, DataLoader(Pairs(), batch_size=2), ckpt_path=str(path), verbose=False)
        weights = [parameter.ds_tensor for parameter in module.parameters()]
        found = [value for value in weights if any(torch.equal(value[: len(k)], k) for k in kept[tag]["weights"])]
        assert len(found) == len(weights)
        trainer.strategy.model.load_checkpoint(folder, tag="second")
        assert any(torch.equal(weights[0][: len(k)], k) for k in kept["second"]["weights"])
    resumed = fit(Valid(), Pairs(), strategy(), steps=0, ckpt_path=str(root / "first"))
    assert_equal_bits(tensors_of(optimizer_of(resumed)), kept["first"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(Valid(), Pairs(), strategy(), steps=0, ckpt_path=folder)
    said = any("none of a Trainer's entries" in str(each.message) for each in caught)
    assert said == (torch.distributed.get_rank() == 0)
    assert_equal_bits(tensors_of(optimizer_of(resumed)), kept["third"])
    for arguments in ({"tag": "fourth"}, {"tag": "../elsewhere"}):
        assert "Tags that are there: first, second, third" in refused(engine, folder, **arguments)
    on_rank_0(lambda: (root / "latest").write_text("gone"))
    assert "names 'gone'. Tags that are there: first, second, third" in refused(engine, folder)
    on_rank_0(lambda: (root / "latest").unlink())
    assert "no file named latest. Tags that are there" in refused(engine, folder)


def test_the_tag_that_is_asked_for_is_loaded(ranks, tmp_path):
    ranks(2).run(tags, str(tmp_path))


def without_frozen(folder: str, exclude: bool) -> tuple[list[str], bool]:
    from lightning_zero3.agreement import together

    trainer = fit(Frozen(), Pairs(), strategy(exclude_frozen_parameters=exclude), steps=2)
    trainer.save_checkpoint(folder)
    together(lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(Frozen(2.0), Pairs(), strategy(), steps=2, ckpt_path=folder)
    assert_equal_bits(tensors_of(optimizer_of(resumed)), tensors_of(optimizer_of(trainer)))
    value = resumed.lightning_module.kept.ds_tensor[0].item()
    return [str(each.message) for each in caught if "frozen parameters" in str(each.message)], value == 2.0


@pytest.mark.parametrize("exclude", [True, False])
def test_a_fit_without_frozen_parameters_goes_on_and_names_them(ranks, tmp_path, exclude):
    ((messages, stayed),) = ranks(1).run(without_frozen, str(tmp_path), exclude)
    assert stayed is exclude
    assert len(messages) == int(exclude)
    if exclude:
        assert "saved without frozen parameters; 1 stay as they are: kept." in messages[0]
