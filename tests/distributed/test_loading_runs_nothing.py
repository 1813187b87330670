# SPDX-License-Identifier: Apache-2.0
"""Nothing in a checkpoint is run, whichever of its files it is in, unless the user trusts it."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.test_loading import Runs, Valid, on_rank_0, saved, shard, strategy
from tests.fits import QUIET, Pairs


class Harmless:
    """What a user's callback may well have in its state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value


def with_entry(path: Path, entry: Any) -> None:
    """A shard, or a single file, with one more entry in it."""
    content = torch.load(path, weights_only=False)
    torch.save({**content, "callbacks": {"theirs": entry}}, path)


def calls(load_full_weights: bool, path: str, trust: bool = False, weights_only: Any = None) -> None:
    """fit and validate of one checkpoint, by fresh Trainers."""
    for call in ("fit", "validate"):
        options = {"load_full_weights": load_full_weights, "trust_checkpoint": trust}
        trainer = pl.Trainer(
            **QUIET, strategy=strategy(**options), devices=torch.distributed.get_world_size(), max_steps=3
        )
        getattr(trainer, call)(Valid(), DataLoader(Pairs(), batch_size=2), ckpt_path=path, weights_only=weights_only)


def unpickled(folder: str) -> list[str]:
    root, rank, said = Path(folder), torch.distributed.get_rank(), []
    saved(f"{root}/whole", module=Valid())
    plain = {"state_dict": Valid().state_dict(), "pytorch-lightning_version": pl.__version__}
    for kind in ("model", "optim", "single"):
        path = shard(root / "now", 0, kind) if kind != "single" else root / "single.ckpt"
        target = str(root / "now") if kind != "single" else str(path)

        def prepare(entry: Any, kind: str = kind, path: Path = path) -> None:
            shutil.rmtree(root / "now", ignore_errors=True)
            shutil.copytree(root / "whole", root / "now")
            if kind == "single":
                torch.save({**plain, "optimizer_states": [], "lr_schedulers": []}, path)
            with_entry(path, entry)

        for trap, trusting in ((True, False), (False, False), (False, True)):
            entry: Any = Runs(root / f"ran-{kind}") if trap else Harmless(3)
            on_rank_0(lambda entry=entry, prepare=prepare: prepare(entry))
            if trusting:
                calls(kind == "single", target, trust=True)
                calls(kind == "single", target, weights_only=False)
                with torch.serialization.safe_globals([Harmless]):
                    calls(kind == "single", target)
                with pytest.raises(RuntimeError, match="trust_checkpoint=True"):
                    calls(kind == "single", target, trust=True, weights_only=True)
                continue
            for call in ("fit", "validate"):
                trainer = pl.Trainer(
                    **QUIET,
                    strategy=strategy(load_full_weights=kind == "single"),
                    devices=torch.distributed.get_world_size(),
                    max_steps=3,
                )
                with pytest.raises(RuntimeError) as caught:
                    getattr(trainer, call)(Valid(), DataLoader(Pairs(), batch_size=2), ckpt_path=target)
                assert trainer.global_step == 0
                said.append(f"{'trap' if trap else 'class'} {path.name} {type(caught.value).__name__} {caught.value}")
        assert not list(root.glob("ran-*")), "code of a checkpoint has run"
    if rank == 0:
        # That the trap is one.
        torch.save(Runs(root / "ran"), root / "trap.pt")
        torch.load(root / "trap.pt", weights_only=False)
        assert (root / "ran").exists()
    return said


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_in_a_checkpoint_is_run(ranks, tmp_path, count):
    for said in ranks(count).run(unpickled, str(tmp_path)):
        assert len(said) == 12
        for message in said:
            kind, name, error, text = message.split(" ", 3)
            assert error == "UntrustedCheckpointError", message
            assert name in text
            assert "trust_checkpoint=True" in text
            assert "weights_only=False" in text
            if kind == "trap":
                assert "posix.system" in text
                assert "add_safe_globals" not in text  # torch allows nothing from there
            else:
                assert "test_loading_runs_nothing.Harmless" in text
                assert "add_safe_globals([" in text
