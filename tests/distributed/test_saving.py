# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is saved as a whole or not at all, and what failed on one rank is told on all."""

import os
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints import commit, manifest, saver
from lightning_zero3.checkpoints.saver import Saver
from lightning_zero3.substitution import substituted
from tests.distributed.stock import StockOnCPU
from tests.engines import Trainable, build, micro_step
from tests.fits import QUIET, Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.ranks import RankFailure, RankPool
from tests.saves import ZERO, is_last_rank, no_room_for_files, ours, rank, refused, save


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
    ("which", "background"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False), (0, True), (1, True))],
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


def swapped(folder: str) -> None:
    """The optimizer's files on NVMe are part of the checkpoint, as they are at the save, and of what can fail."""
    model = Trainable(dims=(600, 600, 7))
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/nvme", "buffer_count": 6}}
    aio = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    engine, saver_ = build(model, sub_group_size=1, zero=zero, aio=aio), Saver()

    def step() -> None:
        engine.backward(engine((torch.ones(2, 600), torch.ones(2, 7)), 0))
        engine.step()

    step()
    save(saver_, engine, Path(folder, "a.ckpt"))
    save(saver_, engine, Path(folder, "b.ckpt"), background=True)
    step()
    saver_.finish()
    at_once, background = (manifest.read(Path(folder, f"{name}.ckpt")).files for name in "ab")
    assert any(name.startswith("checkpoint/offloaded_tensors/rank0") for name in at_once)
    assert at_once == background
    assert manifest.verify(Path(folder, "b.ckpt"))
    with no_room_for_files(1_000_000):
        said = refused(lambda: save(saver_, engine, Path(folder, "a.ckpt")))
    assert "File too large" in said
    assert manifest.verify(Path(folder, "a.ckpt"))
    saver_.close()


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_an_optimizer_on_nvme_is_saved_with_its_files(ranks, tmp_path):
    ranks(1).run(swapped, str(tmp_path))
