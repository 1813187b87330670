"""A checkpoint is saved as a whole or not at all, at once and in the background, and its end is told to every rank."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints import commit, manifest, saver
from lightning_zero3.checkpoints.saver import CheckpointNotSavedError, Request, Saver
from lightning_zero3.checkpoints.writer import Writer
from lightning_zero3.substitution import substituted
from tests.distributed.stock import StockOnCPU
from tests.engines import build, micro_step
from tests.fits import QUIET, Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.ranks import RankFailure, RankPool

ZERO = {"stage": 3, "stage3_param_persistence_threshold": 40, "sub_group_size": 200}


def ours(**arguments: Any) -> Zero3FastStrategy:
    return Zero3FastStrategy({"zero_optimization": dict(ZERO)}, **arguments)


def rank() -> int:
    return torch.distributed.get_rank()


def is_last_rank() -> bool:
    return rank() == torch.distributed.get_world_size() - 1


@contextmanager
def no_room_for_files(size: int = 2048) -> Iterator[None]:
    """The kernel lets this process write no file beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save(saver_: Saver, engine: Any, path: Path, **arguments: Any) -> None:
    background = arguments.pop("background", False)
    request = Request(path=path, client_state={"said": "x"}, layout={"ranks": 1}, **arguments)
    saver_.save(engine, request, background=background)


def refused(save_it: Any) -> str:
    with pytest.raises(CheckpointNotSavedError) as caught:
        save_it()
    return str(caught.value)


def failures(folder: str) -> list[str]:
    """Every way in which a save fails is the same error on all ranks, and the checkpoint before it is whole."""
    engine, saver_ = build(), Saver()
    micro_step(engine, 0)
    path, others = Path(folder, "last.ckpt"), Path(folder, f"of_rank_{rank()}")
    save(saver_, engine, path)
    first = (path / manifest.MANIFEST).read_text()
    micro_step(engine, 1)
    said = []
    for background in (False, True):
        with ExitStack() as scope:
            if is_last_rank():
                scope.enter_context(no_room_for_files())

            def both(background: bool = background) -> None:
                save(saver_, engine, path, background=background)
                saver_.finish()

            said.append(refused(both))
    Path(folder, "file").touch()
    said.append(refused(lambda: save(saver_, engine, Path(folder, "file", "a.ckpt"))))
    if torch.distributed.get_world_size() > 1:
        # Folders of the ranks' own, as on nodes that share none.
        with substituted(saver, "_NFS_REMEMBERS_SECONDS", 0.0):
            said.append(refused(lambda: save(saver_, engine, others / "a.ckpt")).split(" isn't saved")[1])
    assert manifest.verify(path)
    assert (path / manifest.MANIFEST).read_text() == first
    torch.distributed.barrier()
    assert not Path(folder, commit.ROOM).exists()
    torch.distributed.barrier()
    # And it goes on: the same path, with room.
    save(saver_, engine, path)
    assert manifest.verify(path)
    assert (path / manifest.MANIFEST).read_text() != first
    saver_.close()
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_on_one_rank_is_told_on_all(ranks, world_size, tmp_path):
    answers = ranks(world_size).run(failures, str(tmp_path))
    assert all(said == answers[0] for said in answers)
    too_large, in_background, no_folder, *not_shared = answers[0]
    for said in (too_large, in_background):
        assert f"rank {world_size - 1} (" in said
        assert "File too large" in said
        assert "last.ckpt isn't saved; what was there is as it was" in said
    assert "Not a directory" in no_folder
    assert "rank 0 (" in no_folder
    assert [("all nodes must share it" in said, "rank 1 (" in said) for said in not_shared] == [(True, True)] * (
        world_size - 1
    )


def full_disk(folder: str) -> tuple[str, list[str]]:
    engine, saver_ = build(), Saver()
    micro_step(engine, 0)
    path, ballast = Path(folder, "last.ckpt"), Path(folder, "ballast")
    save(saver_, engine, path)
    torch.distributed.barrier()
    if rank() == 0:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        ballast.write_bytes(b"x" * (free - 20_000))
    torch.distributed.barrier()
    micro_step(engine, 1)
    said = refused(lambda: save(saver_, engine, path))
    assert manifest.verify(path)
    engine.load_checkpoint(str(path))
    torch.distributed.barrier()
    left = sorted(each.name for each in path.parent.iterdir())
    torch.distributed.barrier()
    if rank() == 0:
        ballast.unlink()
    torch.distributed.barrier()
    save(saver_, engine, path)
    assert manifest.verify(path)
    return said, left


def test_a_full_disk_leaves_the_checkpoint_before(ranks, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small file system here: {mounted.stderr.decode().strip()}")
    try:
        answers = ranks(2).run(full_disk, str(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert answers[0] == answers[1]
    assert "No space left on device" in answers[0][0]
    assert answers[0][1] == ["ballast", "last.ckpt"]


def killed(folder: str, which: int, background: bool) -> None:
    """A rank is killed when it opens its second file of the second save."""
    engine, saver_ = build(), Saver()
    micro_step(engine, 0)
    save(saver_, engine, Path(folder, "last.ckpt"))
    opened: list[Any] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and commit.ROOM in str(arguments[0]) and arguments[1] == "w":
            opened.append(arguments[0])
            if len(opened) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank() == which:
        sys.addaudithook(count)
    micro_step(engine, 1)
    save(saver_, engine, Path(folder, "last.ckpt"), background=background)
    saver_.finish()


def after_the_kill(folder: str) -> None:
    path = Path(folder, "last.ckpt")
    assert manifest.verify(path)
    engine, saver_ = build(), Saver()
    engine.load_checkpoint(str(path))
    assert engine.global_steps == 1
    save(saver_, engine, path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["last.ckpt"]


@pytest.mark.parametrize(
    ("which", "background"), [(1, False), *(pytest.param(which, True, marks=pytest.mark.slow) for which in (0, 1))]
)
def test_a_rank_that_is_killed_in_the_middle_leaves_the_checkpoint_before(which, background, ranks, tmp_path):
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure, match="process died") as caught:
            pool.run(killed, str(tmp_path), which, background)
    finally:
        pool.close()
    assert "CheckpointNotSavedError" in str(caught.value)
    assert "nother rank has ended" in str(caught.value)
    # What is left is what rank 0 can't clear away any more.
    assert commit.folder_for(tmp_path / "last.ckpt").exists() == (which == 0)
    ranks(2).run(after_the_kill, str(tmp_path))


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


class Edits(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = self.net(batch[0])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.bias"]
        checkpoint["state_dict"]["mine"] = torch.ones(1)


def weights_only(folder: str) -> tuple[int, int, list[str]]:
    """A fraction of the bytes; evaluation, stock's load of weights alone, and its script read them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Edits(), Pairs(), ours())
        for name, alone in (("whole", False), ("weights", True)):
            trainer.save_checkpoint(f"{folder}/{name}.ckpt", weights_only=alone)
    trained = tensors_of(optimizer_of(trainer))
    # Stock Lightning goes on from what ours has saved.
    config = {"zero_optimization": dict(ZERO), "zero_allow_untested_optimizer": True}
    theirs = fit(Edits(), Pairs(), StockOnCPU(config=config), ckpt_path=f"{folder}/whole.ckpt")
    assert_equal_bits(trained, tensors_of(optimizer_of(theirs)))
    sizes = []
    for name in ("whole", "weights"):
        read = manifest.read(Path(folder, f"{name}.ckpt"))
        assert read.weights_only == (name == "weights")
        sizes.append(sum(file.size for key, file in read.files.items() if key.endswith("optim_states.pt")))
    loader = DataLoader(Pairs(length=8), batch_size=2)
    again, fresh = Edits(), pl.Trainer(**QUIET, strategy=ours(), devices=torch.distributed.get_world_size())
    fresh.validate(again, loader, ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    trainer.validate(trainer.lightning_module, loader, verbose=False)
    assert torch.equal(again.seen, trainer.lightning_module.seen)
    stock = build(stock=True, sub_group_size=200, zero={"stage3_param_persistence_threshold": 40})
    stock.load_checkpoint(f"{folder}/weights.ckpt", load_optimizer_states=False)
    loaded = tensors_of(stock.optimizer)
    assert_equal_bits({"masters": trained["masters"]}, {"masters": loaded["masters"]})
    if rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        assert "net.0.bias" in get_fp32_state_dict_from_zero_checkpoint(f"{folder}/weights.ckpt")
    torch.distributed.barrier()
    return sizes[0], sizes[1], [str(each.message) for each in caught if "state dict" in str(each.message)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_alone_and_edits_of_the_state_dict(ranks, world_size, tmp_path):
    answers = ranks(world_size).run(weights_only, str(tmp_path))
    whole, alone, _ = answers[0]
    assert alone < 0.6 * whole
    said = answers[0][2]
    assert "removed net.0.bias; added mine" in said[0]
    assert all(said == [] for _, _, said in answers[1:])


def upstreams_own(folder: str) -> list[str]:
    """A DeepSpeed config that asks for local folders is saved as upstream saves."""
    config = {"zero_optimization": dict(ZERO), "checkpoint": {"use_node_local_storage": True}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Regression(), Pairs(), Zero3FastStrategy(config))
        trainer.save_checkpoint(f"{folder}/a.ckpt")
    assert manifest.verify(Path(folder, "a.ckpt")) is False
    return [str(each.message) for each in caught if "node_local" in str(each.message)]


def test_where_only_upstream_can_save_that_is_said(ranks, tmp_path):
    [said] = ranks(1).run(upstreams_own, str(tmp_path))
    assert "saves by itself" in said[0]


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
