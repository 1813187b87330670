# SPDX-License-Identifier: Apache-2.0
"""``pytorch_lightning`` and ``lightning_fabric``: the same names, the same code, the same bits."""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader

import lightning_zero3
from lightning_zero3 import UnsupportedFeatureError, Zero3Monitor
from tests.fabric_loops import train
from tests.fits import QUIET, Pairs, Regression, Sentences, assert_equal_bits, optimizer_of, tensors_of
from tests.models import build, tiny

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}


def module_of(pl: Any) -> Any:
    """A LightningModule of a package, around a tiny mixture of experts."""

    class Language(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(tiny("glm"), seed=1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.net(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Language()


def trainer_of(pl: Any, strategy: Any, **options: Any) -> Any:
    return pl.Trainer(**{**QUIET, "strategy": strategy, "devices": distributed.get_world_size(), **options})


def life(name: str, path: Path) -> dict[str, Any]:
    """Fit with a schedule of accumulation, save, resume, evaluate in a fresh Trainer."""
    pl = importlib.import_module(name)
    home: Any = lightning_zero3 if name == "lightning.pytorch" else lightning_zero3.pytorch_lightning
    strategy = home.Zero3FastStrategy
    options = {"expert_parallel_size": 2, "router_bias_update_speed": 0.01}
    settings = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    schedule = {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 1})], "max_epochs": 2}
    data = DataLoader(Sentences(64, length=16), batch_size=2)
    module, trainer = module_of(pl), trainer_of(pl, strategy(CONFIG, **options), **settings, **schedule)
    trainer.fit(module, data)
    trainer.save_checkpoint(path / name)
    resumed, monitor = module_of(pl), Zero3Monitor(summary=False)
    again = trainer_of(
        pl, strategy(CONFIG, **options), **settings, max_epochs=3, callbacks=[monitor], log_every_n_steps=1
    )
    again.fit(resumed, data, data, ckpt_path=path / name)
    fresh = trainer_of(pl, strategy(CONFIG, **options), **settings)
    (result,) = fresh.validate(module_of(pl), data, ckpt_path=path / name, verbose=False)
    return {
        "strategy": (type(trainer.strategy).__module__, isinstance(trainer.strategy, pl.strategies.DeepSpeedStrategy)),
        "losses": [*module.losses, *resumed.losses, result["val"]],
        "steps": (trainer.global_step, again.global_step),
        "bits": tensors_of(optimizer_of(again)),
        "metrics": sorted(monitor.latest),
    }


def both_lives() -> None:
    paths = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(paths)
    theirs, ours = (life(name, Path(paths[0])) for name in ("pytorch_lightning", "lightning.pytorch"))
    assert theirs.pop("strategy") == ("lightning_zero3.pytorch_lightning", True)
    assert ours.pop("strategy") == ("lightning_zero3.strategy", True)
    assert_equal_bits(theirs.pop("bits"), ours.pop("bits"))
    assert theirs == ours
    assert "optim/grad_norm" in ours["metrics"]


def refused_there() -> str:
    pl = importlib.import_module("pytorch_lightning")
    swa = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)
    trainer = trainer_of(pl, "zero3_fast", callbacks=[swa], max_steps=1)
    with pytest.raises(UnsupportedFeatureError) as caught:
        trainer.fit(module_of(pl), DataLoader(Sentences(64), batch_size=2))
    return str(caught.value)


def the_other_fabric() -> None:
    from lightning_fabric import Fabric

    seen = []
    for kind in (None, Fabric):
        options = {} if kind is None else {"kind": kind}
        fabric, model, optimizer = train(Regression(), Pairs(), "zero3_fast", accumulate=2, clip=0.1, **options)
        fabric.save(tempfile.mkdtemp() if fabric.world_size == 1 else "never", {"model": model, "optimizer": optimizer})
        seen.append((type(fabric.strategy).__module__, tensors_of(optimizer.optimizer)))
    assert [module for module, _ in seen] == ["lightning_zero3.fabric.strategy", "lightning_zero3.lightning_fabric"]
    assert_equal_bits(seen[0][1], seen[1][1])


def test_a_life_under_pytorch_lightning_has_the_same_bits(ranks):
    ranks(2).run(both_lives)


def test_what_is_refused_is_refused_under_pytorch_lightning_too(ranks):
    assert "StochasticWeightAveraging copies whole weights" in ranks(1).run(refused_there)[0]


def test_a_loop_under_lightning_fabric_has_the_same_bits(ranks):
    ranks(1).run(the_other_fabric)
