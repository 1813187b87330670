# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: the bytes of a save at once, and an end that every rank is told of."""

import io
import json
import threading
from contextlib import ExitStack, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints import commit, manifest, saver
from lightning_zero3.checkpoints.saver import CheckpointNotSavedError, Saver
from lightning_zero3.checkpoints.writer import Writer
from lightning_zero3.substitution import substituted
from tests.engines import build
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.saves import is_last_rank, no_room_for_files, ours, rank, refused, save


class Saves(pl.Callback):
    """After the second step: the same checkpoint at once and in the background, which is held up until the fourth."""

    def __init__(self, folder: str) -> None:
        self.folder, self.go_on = Path(folder), threading.Event()
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == 2:
            with substituted(strategy, "options", Zero3FastStrategy().options):
                trainer.save_checkpoint(self.folder / "at_once.ckpt")
            trainer.save_checkpoint(self.folder / "in_background.ckpt")
            self.seen["at the save"] = tensors_of(optimizer_of(trainer))
            assert strategy._saver.pending == self.folder / "in_background.ckpt"
            # Neither a removal nor a link before what they follow.
            strategy.remove_checkpoint(self.folder / "at_once.ckpt")
        if trainer.global_step == 3:
            assert not (self.folder / "in_background.ckpt").exists()
            assert (self.folder / "at_once.ckpt").exists()
            self.seen["after a step"] = tensors_of(optimizer_of(trainer))
            trainer.strategy.barrier()
            if rank() == 0:
                (self.folder / "at_once.ckpt").rename(self.folder / "kept.ckpt")
            trainer.strategy.barrier()
            self.go_on.set()
            # Nothing but the steps themselves commits it.
            strategy._saver._pending.written.result()
        if trainer.global_step == 4:
            self.seen["committed during the fit"] = (self.folder / "in_background.ckpt").exists()


def in_the_background(folder: str, precision: str) -> None:
    saves = Saves(folder)
    write = Writer._write_chunks

    def held(self: Writer, *arguments: Any) -> None:
        assert saves.go_on.wait(60)
        write(self, *arguments)

    with substituted(Writer, "_write_chunks", held):
        strategy = ours(async_save=True)
        fit(
            Regression(), Pairs(), strategy, steps=5, precision=precision, callbacks=[saves], enable_checkpointing=False
        )
    assert saves.seen["committed during the fit"]
    before, after = saves.seen["at the save"], saves.seen["after a step"]
    assert any(not torch.equal(a, b) for a, b in zip(before["masters"], after["masters"], strict=True))
    at_once, background = (manifest.read(Path(folder, f"{name}.ckpt")) for name in ("kept", "in_background"))
    assert manifest.verify(Path(folder, "in_background.ckpt"))
    assert at_once.files == background.files
    assert background.layout["ranks"] == torch.distributed.get_world_size()
    resumed = fit(Regression(), Pairs(), ours(), steps=2, precision=precision, ckpt_path=f"{folder}/in_background.ckpt")
    assert_equal_bits(before, tensors_of(optimizer_of(resumed)))


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [
        (1, "32-true"),
        (2, "bf16-mixed"),
        *(pytest.param(2, p, marks=pytest.mark.slow) for p in ("32-true", "bf16-true")),
    ],
)
def test_a_checkpoint_in_the_background_has_the_bytes_of_one_at_once(ranks, world_size, precision, tmp_path):
    ranks(world_size).run(in_the_background, str(tmp_path), precision)


class FailsOnce(pl.Callback):
    """A file can't be written in the background, of a save that is to replace an earlier one."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scope, self.steps = Path(folder), ExitStack(), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps = trainer.global_step
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "one.ckpt")
        if trainer.global_step == 2:
            trainer.strategy.finish_saving()  # the first one has its room
            if is_last_rank():
                self.scope.enter_context(no_room_for_files())
            trainer.save_checkpoint(self.folder / "two.ckpt")
            trainer.strategy.remove_checkpoint(self.folder / "one.ckpt")


def background_failure(folder: str) -> tuple[int, str]:
    fails = FailsOnce(folder)
    with pytest.raises(CheckpointNotSavedError) as caught:
        fit(Regression(), Pairs(), ours(async_save=True), steps=30, callbacks=[fails])
    fails.scope.close()
    torch.distributed.barrier()
    assert manifest.verify(Path(folder, "one.ckpt"))
    assert sorted(each.name for each in Path(folder).iterdir()) == ["one.ckpt"]
    return fails.steps, str(caught.value)


class Ends(pl.Callback):
    """An exception on all ranks while a checkpoint is being written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/two.ckpt")
            raise ArithmeticError("of the user's")


def exception_on_all(folder: str) -> None:
    with pytest.raises(ArithmeticError):
        fit(Regression(), Pairs(), ours(async_save=True), callbacks=[Ends(folder)])
    torch.distributed.barrier()
    assert manifest.verify(Path(folder, "two.ckpt"))


def the_end_of_a_fit(folder: str) -> None:
    class AtTheEnd(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/end.ckpt")
            assert trainer.strategy._saver.pending is not None

    trainer = fit(Regression(), Pairs(), ours(async_save=True), callbacks=[AtTheEnd()])
    assert manifest.verify(Path(folder, "end.ckpt"))
    # There is no step to come that would commit it.
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    assert manifest.verify(Path(folder, "after.ckpt"))


def exception_on_one(folder: str) -> str:
    """The others are still training: nobody waits for ever, and nothing half written is at the path."""
    engine, saver_, said = build(), Saver(), io.StringIO()
    with substituted(saver, "_AFTER_AN_EXCEPTION", timedelta(seconds=1)), redirect_stdout(said):
        save(saver_, engine, Path(folder, "a.ckpt"), background=True)
        if is_last_rank():
            saver_.close(after_exception=True)
        torch.distributed.barrier()
        if not is_last_rank():
            saver_.close(after_exception=True)
    torch.distributed.barrier()
    assert not Path(folder, "a.ckpt").exists()
    saver_ = Saver()
    save(saver_, engine, Path(folder, "a.ckpt"))
    assert manifest.verify(Path(folder, "a.ckpt"))
    return said.getvalue()


def test_an_exception_on_one_rank_waits_for_the_others_for_a_while_only(ranks, tmp_path):
    for number, said in enumerate(ranks(2).run(exception_on_one, str(tmp_path))):
        assert f"Rank {number}: {tmp_path}/a.ckpt was being written when training ended" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_in_the_background_ends_with_the_fit(ranks, world_size, tmp_path):
    for name in ("fails", "raises", "ends"):
        (tmp_path / name).mkdir()
    answers = ranks(world_size).run(background_failure, str(tmp_path / "fails"))
    assert all(answer == answers[0] for answer in answers)
    assert f"rank {world_size - 1} (" in answers[0][1]
    assert 2 <= answers[0][0] < 30
    ranks(world_size).run(exception_on_all, str(tmp_path / "raises"))
    ranks(world_size).run(the_end_of_a_fit, str(tmp_path / "ends"))


def retention(folder: str, save_last: Any, in_background: bool) -> list[str]:
    """With every removal there is a whole checkpoint left, and ``last.ckpt`` always means one."""
    removed, remove = [], commit.remove

    def checked(path: Path) -> None:
        kept = [each for each in path.parent.glob("*.ckpt") if each != path and not each.is_symlink()]
        assert any(manifest.verify(each) for each in kept)
        remove(path)
        last = path.parent / "last.ckpt"
        assert not last.is_symlink() or manifest.verify(last)
        removed.append(path.name)

    keep = ModelCheckpoint(folder, save_top_k=1, save_last=save_last, every_n_train_steps=1, filename="{step}")
    with substituted(commit, "remove", checked):
        fit(Regression(), Pairs(), ours(async_save=in_background), enable_checkpointing=True, callbacks=[keep])
    assert removed == ([f"step={step}.ckpt" for step in range(1, 5)] if rank() == 0 else [])
    torch.distributed.barrier()
    assert manifest.verify(Path(folder, "last.ckpt"))
    assert Path(folder, "last.ckpt").is_symlink() == (save_last == "link")
    resumed = fit(Regression(), Pairs(), ours(), steps=6, ckpt_path=f"{folder}/last.ckpt")
    assert resumed.global_step == 6
    return sorted(each.name for each in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("world_size", "save_last", "in_background"),
    [
        (2, "link", True),
        *(
            pytest.param(size, last, background, marks=pytest.mark.slow)
            for size in (1, 2)
            for last in ("link", True)
            for background in (False, True)
            if (size, last, background) != (2, "link", True)
        ),
    ],
)
def test_retention_removes_the_last_good_one_only_after_the_next(ranks, world_size, save_last, in_background, tmp_path):
    for names in ranks(world_size).run(retention, str(tmp_path), save_last, in_background):
        assert names == ["last.ckpt", "step=5.ckpt"]


def too_little_memory(folder: str) -> str:
    import psutil

    class Nothing:
        available = 100

    engine, saver_ = build(), Saver()
    with substituted(psutil, "virtual_memory", Nothing):
        said = refused(lambda: save(saver_, engine, Path(folder, "a.ckpt"), background=True))
    saver_.close()
    return said


def test_too_little_host_memory_for_a_copy_is_told(ranks, tmp_path):
    [said] = ranks(1).run(too_little_memory, str(tmp_path))
    assert "copy of what is saved in host memory" in said
    assert "async_save=False" in said


def test_the_manifest_is_json(ranks, tmp_path):
    ranks(1).run(the_end_of_a_fit, str(tmp_path))
    content = json.loads((tmp_path / "end.ckpt" / "manifest.json").read_text())
    assert content["tag"] == (tmp_path / "end.ckpt" / "latest").read_text() == "checkpoint"
