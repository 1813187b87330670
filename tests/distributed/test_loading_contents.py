# SPDX-License-Identifier: Apache-2.0
"""What real checkpoints hold is on the list: every precision and layout, schedulers, callbacks, metrics, parameters."""

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from tests.distributed.test_evaluate import AUTOCAST, EP2, TP2, Words
from tests.engines import BF16_MASTERS, async_io_works
from tests.fits import QUIET, Pairs, Regression, Sentences, assert_equal_bits, optimizer_of, tensors_of

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 10)], [2]
    ),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


class Rich(Regression):
    """With hyperparameters of several kinds, metrics that are saved, and a scheduler."""

    def __init__(self, where: Any = Path("x"), more: Any = None, schedule: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error = torchmetrics.MeanSquaredError()
        self.error.persistent(True)
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.error(torch.zeros(2), torch.ones(2))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[0]) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = {"scheduler": SCHEDULERS[self.schedule](optimizer), "monitor": "val", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


# Ranks, precision, config, options, scheduler (None: a language model), the Trainer's options.
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], str | None, dict[str, Any]]] = {
    "fp32": (2, "32-true", {}, {}, "step", {"accumulate_grad_batches": 2}),
    "bf16": (2, "bf16-mixed", {}, {}, "lambda", {}),
    "bf16 weights": (1, "bf16-true", {}, {}, "plateau", {}),
    "autocast": (1, "32-true", AUTOCAST, {}, "one cycle", {}),
    "bf16 masters": (1, "bf16-mixed", {"bf16": BF16_MASTERS}, {}, "warm restarts", {}),
    "optimizer on the CPU": (1, "32-true", {}, {"offload_optimizer": True}, "sequence", {}),
    "NVMe": (1, "32-true", {}, {"nvme": True}, "step", {}),
    "experts": (2, "bf16-mixed", {}, EP2, None, {}),
    "tensors": (2, "32-true", {}, TP2, None, {}),
    "both": (2, "32-true", {}, {**EP2, **TP2}, None, {}),
    "stock's experts": (1, "32-true", {}, {"expert_parallel_size": 1, "stock_semantics": True}, None, {}),
}


def there_and_back(folder: str, name: str) -> list[str]:
    _, precision, config, options, schedule, more = CASES[name]
    options, config = dict(options), copy.deepcopy(config)
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 40, "sub_group_size": 500}
    if options.pop("nvme", False):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": f"{folder}/nvme"}
    loader = DataLoader(Pairs(length=16) if schedule else Sentences(64, length=16), batch_size=2)

    def module() -> Any:
        return Words() if schedule is None else Rich(Path("/a"), argparse.Namespace(width=3), schedule)

    def trainer() -> pl.Trainer:
        callbacks: list[Any] = [
            Zero3Monitor(),
            pl.callbacks.EarlyStopping("val", check_finite=False),
            pl.callbacks.Timer(),
            pl.callbacks.ModelCheckpoint(f"{folder}/best", monitor="val", save_last=True),
        ]
        settings = {"zero_optimization": copy.deepcopy(zero), **copy.deepcopy(config)}
        return pl.Trainer(
            **{**QUIET, "enable_checkpointing": schedule is not None, **more},
            strategy=Zero3FastStrategy(settings, **options),
            callbacks=callbacks if schedule else [],
            devices=torch.distributed.get_world_size(),
            precision=precision,  # type: ignore[arg-type]
            max_steps=2,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            val_check_interval=1 if schedule else None,
        )

    validation = loader if schedule else None
    first = trainer()
    first.fit(module(), loader, validation)
    first.save_checkpoint(f"{folder}/saved")
    torch.distributed.barrier()
    nvme = "offload_optimizer" in zero
    before = None if nvme else tensors_of(optimizer_of(first))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = trainer()
        again.fit(module(), loader, validation, ckpt_path=f"{folder}/saved")
    if before is not None:
        assert_equal_bits(tensors_of(optimizer_of(again)), before)
    assert again.global_step == 2
    if schedule:
        fresh = trainer()
        fresh.validate(module(), loader, ckpt_path=f"{folder}/saved", verbose=False)
    return [str(each.message) for each in caught if "optimizer that has taken" in str(each.message)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fp32" else pytest.mark.slow) for name in CASES]
)
def test_a_real_checkpoint_is_read_without_trust(ranks, tmp_path, name):
    if name == "NVMe" and not async_io_works():
        pytest.skip("DeepSpeed's op that swaps to files can't be built here")
    for warned in ranks(CASES[name][0]).run(there_and_back, str(tmp_path), name):
        assert not warned
