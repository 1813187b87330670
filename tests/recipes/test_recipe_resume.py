# SPDX-License-Identifier: Apache-2.0
"""A recipe that goes on from a checkpoint has the losses of one that was never interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_zero3.checkpoints import manifest
from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics
from shared import checkpoints
from shared.loader import make_loader
from shared.module import CausalLanguageModel
from shared.saving import SameCheckpoint
from tests.recipes.recipes import RECIPES

STEPS = 11
GLM = RECIPES["glm45air"].RECIPE
SMALL = ("--layers", "2", "--sequence_length", "16", "--micro_batch_size", "2", "--max_steps", str(STEPS))


def text_in(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"{number} of a text that is read again\n" for number in range(20)))
    return str(path)


def losses(run: Path) -> list[float]:
    return list(read_metrics(run / "metrics.csv")[names.LOSS].values())


def trained(folder: str, *arguments: str, ranks: int) -> Path:
    from shared.run import train

    fixed = [*SMALL, "--data", f"{folder}/text.txt", "--devices", str(ranks), "--output", f"{folder}/runs"]
    return train(GLM, GLM.parse([*fixed, *arguments]))


def after_steps(folder: str, ranks: int, options: tuple[str, ...], steps: tuple[int, ...]) -> dict[str, Any]:
    whole = trained(folder, *options, "--checkpoint_every", "1", "--keep", "100", ranks=ranks)
    resumed = {}
    for checkpoint in checkpoints.all_complete(Path(folder) / "runs"):
        if checkpoint.step not in steps:
            continue
        run = trained(folder, *options, "--resume", str(checkpoint.path), ranks=ranks)
        resumed[checkpoint.step] = losses(run)
    return {"whole": losses(whole), "resumed": resumed}


ACCUMULATED = ("--accumulate_grad_batches", "2")
OF_DEEPSPEED = ("--optimizer", "deepspeed", "--warmup_steps", "4")
ALL = tuple(range(1, STEPS))


@pytest.mark.parametrize(
    ("world_size", "options", "steps"),
    [
        (2, ACCUMULATED, (3, 7)),
        (1, (*OF_DEEPSPEED, "--async_save", "true"), (9,)),
        pytest.param(2, ACCUMULATED, ALL, marks=pytest.mark.slow),
        pytest.param(1, OF_DEEPSPEED, ALL, marks=pytest.mark.slow),
        pytest.param(2, ("--tensor_parallel_size", "2", "--precision", "bf16-mixed"), ALL, marks=pytest.mark.slow),
    ],
)
def test_a_resume_after_any_step_gives_the_losses_of_the_uninterrupted_run(ranks, tmp_path, world_size, options, steps):
    text_in(tmp_path)
    seen = ranks(world_size).run(after_steps, str(tmp_path), world_size, options, steps)[0]
    assert len(set(seen["whole"])) == STEPS
    assert tuple(seen["resumed"]) == steps
    for step, after in seen["resumed"].items():
        assert after == seen["whole"][step:], step


def test_several_epochs_are_crossed(tmp_path):
    """Else the test above would show nothing about the order of the next epoch."""
    settings = GLM.parse([*SMALL, "--data", text_in(tmp_path)])
    from shared.preflight import check_data

    samples = check_data(settings, GLM.config(settings), 2)[1]
    assert len(samples) // (2 * 2) < STEPS * 2  # two ranks, two micro-steps
    assert len(samples) // 2 > 2


def interrupted(folder: str) -> tuple[Any, list[float], list[float]]:
    import torch

    rank, calls = torch.distributed.get_rank(), 0
    original = CausalLanguageModel.training_step

    def signalled(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    before = signal.getsignal(signal.SIGTERM)
    options = ("--checkpoint_every", "100", "--resume")
    with mock.patch.object(CausalLanguageModel, "training_step", signalled), pytest.raises(SystemExit) as stopped:
        trained(folder, *options, ranks=2)
    first = losses(Path(folder) / "runs" / "version_0") if rank == 0 else []
    second = trained(folder, *options, ranks=2)
    assert signal.getsignal(signal.SIGTERM) == before
    return stopped.value.code, first, losses(second) if rank == 0 else []


def test_a_signal_on_one_rank_saves_and_stops_all_after_the_same_step(ranks, tmp_path):
    text_in(tmp_path)
    (code, first, second), (other, _, _) = ranks(2).run(interrupted, str(tmp_path))
    assert code == other == 75
    assert (len(first), len(second)) == (4, STEPS - 4)
    (tmp_path / "whole").mkdir()
    text_in(tmp_path / "whole")
    whole, _ = ranks(2).run(whole_run, str(tmp_path / "whole"), str(tmp_path))
    assert first + second == whole
    assert [found.step for found in checkpoints.all_complete(tmp_path / "runs")] == [4, STEPS]


def whole_run(folder: str, data: str) -> list[float]:
    run = trained(folder, "--data", f"{data}/text.txt", ranks=2)
    import torch

    return losses(run) if torch.distributed.get_rank() == 0 else []


class ElsewhereStrategy:
    """What rank 1 of a run sees of its strategy."""

    def __init__(self, of_rank_0: Any) -> None:
        self.of_rank_0 = of_rank_0

    def broadcast(self, value: Any) -> Any:
        return self.of_rank_0

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


def test_nodes_that_find_different_checkpoints_are_refused(tmp_path):
    made(tmp_path, 0, 8)
    trainer = mock.Mock(strategy=ElsewhereStrategy(str(resume(tmp_path).path)), global_rank=1)
    SameCheckpoint(resume(tmp_path)).setup(trainer, mock.Mock(), "fit")
    with pytest.raises(SetupError, match=r"rank 0 has found .*step_00000008, rank 1 none\. All nodes need"):
        SameCheckpoint(None).setup(trainer, mock.Mock(), "fit")


# What a checkpoint's folder says.

MADE_BY = {"recipe": "GLM-4.5-Air", "ranks": 2, "sequence_length": 16}


def made(output: Path, version: int, step: int, first_run: str = "version_0", finished: bool = True) -> Path:
    path = checkpoints.folder_of(output / f"version_{version}", step)
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint" / "shard.pt").write_bytes(b"weights")
    if finished:
        files = {"checkpoint/shard.pt": manifest.measure(path / "checkpoint" / "shard.pt")}
        manifest.write(path, manifest.Manifest("checkpoint", {"ranks": 2}, files=files))
        checkpoints.complete(path, step=step, first_run=first_run, made_by=MADE_BY)
    return path


def resume(output: Path, which: str = "auto", made_by: Any = MADE_BY, steps: int = 100) -> Any:
    settings = GLM.parse(["--output", str(output), "--max_steps", str(steps), "--resume", which])
    return checkpoints.to_resume(settings, made_by)


def test_the_last_complete_checkpoint_is_found(tmp_path):
    assert resume(tmp_path) is None
    assert resume(tmp_path / "not there") is None
    made(tmp_path, 0, 8)
    assert resume(tmp_path).step == 8
    # An older checkpoint's run was taken up again: its steps are fewer, and they are the last.
    made(tmp_path, 10, 6)
    made(tmp_path, 2, 20)
    assert resume(tmp_path).path.parts[-3:] == ("version_10", "checkpoints", "step_00000006")
    made(tmp_path, 10, 9, finished=False)
    assert resume(tmp_path).step == 6
    assert resume(tmp_path, str(tmp_path / "version_2")).step == 20
    assert resume(tmp_path, str(checkpoints.folder_of(tmp_path / "version_0", 8))).step == 8


def test_what_was_cut_short_is_not_complete(tmp_path):
    for step in (2, 4, 6, 8):
        made(tmp_path, 0, step)
    shards = [checkpoints.folder_of(tmp_path / "version_0", step) / "checkpoint" / "shard.pt" for step in (4, 6)]
    shards[0].unlink()
    shards[1].write_bytes(b"wei")
    marker = checkpoints.folder_of(tmp_path / "version_0", 8) / checkpoints.MARKER
    marker.write_text(marker.read_text()[:40])
    assert resume(tmp_path).step == 2
    for step, message in ((4, "is missing"), (6, "has 3 bytes, and was written with 7"), (8, "can't be read")):
        with pytest.raises(SetupError, match=message):
            resume(tmp_path, str(checkpoints.folder_of(tmp_path / "version_0", step)))


def test_what_is_missing_foreign_or_of_other_sizes_is_refused(tmp_path):
    with pytest.raises(SetupError, match="there's no such folder"):
        resume(tmp_path, str(tmp_path / "nothing"))
    (tmp_path / "foreign" / "checkpoint").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"no completed\.json in it, so it isn't a recipe's checkpoint"):
        resume(tmp_path, str(tmp_path / "foreign"))
    path = made(tmp_path, 0, 8)
    for which in ("auto", str(path)):
        with pytest.raises(SetupError, match="ranks is 2 there and 4 here; sequence_length is 16 there and 32 here"):
            resume(tmp_path, which, {**MADE_BY, "ranks": 4, "sequence_length": 32})
        with pytest.raises(SetupError, match=r"has taken 8 steps already, and this run is of 8\. .* --max_steps"):
            resume(tmp_path, which, steps=8)


def test_data_that_was_changed_in_place_is_refused(tmp_path, monkeypatch):
    text = Path(text_in(tmp_path))
    described = {}

    def seen(settings: Any, made_by: Any) -> None:
        described[text.read_text()] = made_by["data"]
        raise SetupError("far enough")

    monkeypatch.setattr(checkpoints, "to_resume", seen)
    for word in ("text", "word"):  # of the same size, under the same name
        text.write_text(text.read_text().replace(" a text ", f" a {word} "))
        with pytest.raises(SetupError, match="far enough"):
            trained(str(tmp_path), "--resume", "auto", ranks=1)
    first, second = described.values()
    assert first.partition(" (digest")[0] == second.partition(" (digest")[0]
    assert first != second


def test_only_the_last_checkpoints_of_a_training_are_kept(tmp_path):
    for version, step, first_run in ((0, 2, 0), (0, 4, 0), (1, 2, 1), (2, 6, 0)):
        made(tmp_path, version, step, f"version_{first_run}")
    unfinished = made(tmp_path, 2, 8, finished=False)
    checkpoints.prune(tmp_path, "version_0", keep=2)
    left = [(found.path.parts[-3], found.step) for found in checkpoints.all_complete(tmp_path)]
    assert left == [("version_0", 4), ("version_1", 2), ("version_2", 6)]
    assert not checkpoints.folder_of(tmp_path / "version_0", 2).exists()
    assert unfinished.exists()


def test_resume_without_a_value_is_auto():
    assert GLM.parse(["--resume"]).resume == "auto"
    assert GLM.parse(["--resume", "--max_steps", "3"]).resume == "auto"
    assert GLM.parse(["--resume", "some/where"]).resume == "some/where"
    assert GLM.parse([]).resume is None
    assert GLM.parse([]).checkpoint_every is None


def test_a_single_ranks_order_is_of_seed_and_epoch_only():
    import torch

    def order(epoch: int, seed: int = 0) -> list[int]:
        loader = make_loader(torch.arange(20), batch_size=4, ranks=1, seed=seed, pin_memory=False)
        torch.rand(epoch + 1)
        loader.sampler.set_epoch(epoch)
        return torch.cat(list(loader)).tolist()

    assert order(0) == order(0)
    assert sorted(order(0)) == list(range(20))
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)
