# SPDX-License-Identifier: Apache-2.0
"""What can't work with partitioned weights is refused before anything is set up, with a remedy."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader

from lightning_zero3 import UnsupportedFeatureError, Zero3FastStrategy
from tests.fits import QUIET, Pairs, Regression


def trainer_of(tmp_path: Any = None, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            **QUIET,
            "devices": 1,
            "max_steps": 1,
            "strategy": Zero3FastStrategy(),
            "default_root_dir": tmp_path,
            **options,
        }
    )


def refused(module: pl.LightningModule, **options: Any) -> str:
    """The refusal, before a process group exists."""
    trainer = trainer_of(**options)
    with pytest.raises(UnsupportedFeatureError) as caught:
        trainer.fit(module, DataLoader(Pairs(), batch_size=2))
    assert not torch.distributed.is_initialized()
    return str(caught.value)


class Small(Regression):
    learning_rate = 1e-2
    batch_size = 2


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (lambda: callbacks.EMAWeightAveraging(), "average the weights of several checkpoints"),
        (lambda: callbacks.WeightAveraging(), "average the weights of several checkpoints"),
        (lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-2), "average the weights of several checkpoints"),
        (lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5), "Prune a single-file checkpoint"),
        (lambda: callbacks.BackboneFinetuning(), "parameter group of their own with lr=0"),
        (lambda: callbacks.LearningRateFinder(), "scheduler that raises the rate"),
        (lambda: callbacks.BatchSizeFinder(), "short fits with max_steps=3"),
    ],
)
def test_callbacks_that_need_whole_weights(callback, remedy):
    made = callback()
    message = refused(Small(), callbacks=[made])
    assert type(made).__name__ in message
    assert remedy in message


def test_a_callback_that_the_module_brings():
    class Bringing(Small):
        def configure_callbacks(self) -> Any:
            return [callbacks.StochasticWeightAveraging(swa_lrs=1e-2)]

    assert "StochasticWeightAveraging" in refused(Bringing())


def test_the_tuner_leaves_nothing_behind(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(UnsupportedFeatureError, match=r"Tuner\.lr_find"):
        Tuner(trainer).lr_find(Small(), DataLoader(Pairs(), batch_size=2))
    with pytest.raises(ValueError, match="batch size is currently not supported with distributed"):
        Tuner(trainer_of(tmp_path)).scale_batch_size(Small(), DataLoader(Pairs(), batch_size=2))
    assert not list(tmp_path.iterdir())
    assert not torch.distributed.is_initialized()


def test_clipping_by_value():
    message = refused(Small(), gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert "gradient_clip_algorithm='norm'" in message


class OwnBackward(Small):
    def backward(self, loss: torch.Tensor) -> None:
        (2 * loss).backward()


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


def test_a_backward_of_the_modules_own_and_a_compiled_part():
    assert "manual_backward" in refused(OwnBackward())
    assert "net is wrapped" in refused(Compiled())
    assert "self.net.compile()" in refused(Compiled())


class ReadsGradients(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        return super().training_step(batch, batch_idx)


class EditsGradients(callbacks.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.clamp_(-1, 1)


class Harmless(callbacks.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            self.count = sum(p.requires_grad for p in pl_module.parameters())


def warned(module: pl.LightningModule, **options: Any) -> list[str]:
    """Warnings of the checks; the fit itself ends at once, on a value that comes after them."""
    trainer = trainer_of(gradient_clip_val=2.0, **options)
    trainer.strategy.config["gradient_clipping"] = 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="gradient_clipping"):
            trainer.fit(module, DataLoader(Pairs(), batch_size=2))
    return [str(w.message) for w in caught if "p.grad is None" in str(w.message)]


def test_hooks_that_read_or_change_gradients_are_named():
    messages = warned(ReadsGradients(), callbacks=[EditsGradients(), Harmless()])
    assert [message.split(":")[0] for message in messages] == [
        "ReadsGradients.on_before_optimizer_step uses grad_norm",
        "ReadsGradients.training_step uses clip_grad_norm_",
        "EditsGradients.on_after_backward uses grad",
    ]
    assert all("lightning_zero3.grad_norms" in message for message in messages)
    assert not warned(Small())


def test_stock_semantics_leave_out_what_stock_ignores():
    trainer = trainer_of(strategy=Zero3FastStrategy(stock_semantics=True), gradient_clip_val=2.0)
    trainer.strategy.config["gradient_clipping"] = 1.0
    with pytest.raises(ValueError, match="gradient_clipping"):
        trainer.fit(OwnBackward(), DataLoader(Pairs(), batch_size=2))
