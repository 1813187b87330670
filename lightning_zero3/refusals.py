# SPDX-License-Identifier: Apache-2.0
"""What of Lightning can't work on a partitioned model, found before process groups and memory are taken.

Lightning's own checks of DeepSpeed come late, after the model is built, and don't say what to do; several things it
accepts and silently leaves out. docs/lightning-features.md lists all, with what works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS

from lightning_zero3.capabilities.probing import referenced_names
from lightning_zero3.lightning_packages import package_of


class UnsupportedFeatureError(MisconfigurationException):
    """Something that Lightning offers can't work with a model that is partitioned over ranks."""


_AVERAGES = (
    "copies whole weights, and here each rank has parts of them. Leave it out and average the weights of several "
    "checkpoints after fit, or train with strategy='ddp'."
)
_FINETUNING = (
    "hands parameters to the optimizer in the middle of fit, and ZeRO Stage 3 has no place for them then. Give all "
    "parameters to the optimizer from the start, those that are to rest in a parameter group of their own with lr=0, "
    "and raise its lr in on_train_epoch_start; or train in two fits."
)
# Callback → why not, and what to do. By name, since not every Lightning has them all.
_CALLBACKS = {
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "StochasticWeightAveraging": _AVERAGES,
    "BaseFinetuning": _FINETUNING,
    "BackboneFinetuning": _FINETUNING,
    "ModelPruning": (
        "masks whole weights, and here each rank has parts of them. Prune a single-file checkpoint after fit, or train "
        "with strategy='ddp'."
    ),
    "LearningRateFinder": (
        "(Tuner.lr_find too) puts a scheduler of its own on the optimizer, which DeepSpeed's can't take. Search with "
        "a smaller model under strategy='auto', or fit for some steps with a scheduler that raises the rate "
        "(torch.optim.lr_scheduler.LambdaLR, interval 'step') and look at the logged loss."
    ),
    "BatchSizeFinder": (
        "(Tuner.scale_batch_size too) needs out-of-memory errors that reach all ranks at once. Try sizes by short fits "
        "with max_steps=3, each in a process of its own; Zero3Monitor logs the memory peaks."
    ),
}
_READS_GRADIENTS = {"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_"}
_CLIPS = {"clip_grad_norm_", "clip_grad_value_"}
_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "configure_gradient_clipping",
)


def check(module: Any, world_size: int, stock_semantics: bool) -> None:
    """Refuse what can't work in a fit of this module; evaluations are left alone.

    Args:
        module: A LightningModule, attached to its Trainer; or None.
        world_size: Number of ranks.
        stock_semantics: Leave out what stock Lightning silently ignores.

    Raises:
        UnsupportedFeatureError: With what was found, why it can't work and what to do.
    """
    if module is None or module.trainer.state.fn != TrainerFn.FITTING:
        return
    trainer, callbacks = module.trainer, package_of(module).callbacks
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise UnsupportedFeatureError(
            "Trainer(gradient_clip_algorithm='value'): DeepSpeed clips by the norm of all gradients only. Pass "
            "gradient_clip_algorithm='norm', with another gradient_clip_val."
        )
    for callback in trainer.callbacks:
        for name, why in _CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, name, ())):
                raise UnsupportedFeatureError(f"The callback {type(callback).__name__} {why}")
    refuse_compiled(module)
    for holder in (module, trainer.datamodule):
        if world_size > 1 and getattr(holder, "allow_zero_length_dataloader_with_multiple_devices", False):
            raise UnsupportedFeatureError(
                f"{type(holder).__name__}.allow_zero_length_dataloader_with_multiple_devices: under ZeRO Stage 3 every "
                "rank must run the same number of batches, so a rank can't do without. Leave it at False, and pad or "
                "split the data evenly."
            )
    if not stock_semantics:
        _check_overridden(module)
        _refuse_lost_clipping(trainer)


def refuse_compiled(module: nn.Module) -> None:
    """Refuse what ``torch.compile`` has wrapped.

    Args:
        module: The root module.

    Raises:
        UnsupportedFeatureError: A part of it is a wrapper.
    """
    compiled = [name for name, part in module.named_modules() if hasattr(part, "_orig_mod")]
    if compiled:
        raise UnsupportedFeatureError(
            f"{compiled[0] or type(module).__name__} is wrapped by torch.compile(...), and DeepSpeed's hooks can't "
            "follow its parameters into the wrapper. Compile it in place, without a wrapper: self.net.compile()."
        )


def _refuse_lost_clipping(trainer: Any) -> None:
    """Let ``clip_gradients`` refuse what DeepSpeed's engine won't do, where Lightning's plugin does nothing.

    Upstream symbol: ``DeepSpeedPrecision.clip_gradients`` (Lightning 2.6.6), a silent no-op. Replaced on this Trainer's
    plugin only. Expires when Lightning refuses by itself.

    Args:
        trainer: A Trainer in fit.
    """
    plugin = trainer.precision_plugin

    def clip_gradients(_: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        engine = trainer.strategy.model.gradient_clipping()
        if not clip_val or (clip_val == engine and gradient_clip_algorithm == GradClipAlgorithmType.NORM):
            return  # the engine clips within the step
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm).value
        raise UnsupportedFeatureError(
            f"clip_gradients(gradient_clip_val={clip_val}, gradient_clip_algorithm={algorithm!r}): "
            f"DeepSpeed clips within its step, by the norm, and here to {engine or 'nothing'}. Pass "
            f"Trainer(gradient_clip_val={clip_val}), or with manual optimization "
            f"Zero3FastStrategy(config={{'gradient_clipping': {clip_val}, 'zero_optimization': {{'stage': 3}}}}), and "
            "leave this call out."
        )

    plugin.clip_gradients = clip_gradients


def the_optimizer(module: Any) -> tuple[Any, Any]:
    """The one optimizer and the scheduler, if any, that a module configures.

    Upstream symbol: ``DeepSpeedStrategy._init_optimizers`` (Lightning 2.6.6), whose errors name no remedy, or which
    lets DeepSpeed fail on what it returns.

    Args:
        module: Attached to its Trainer.

    Raises:
        UnsupportedFeatureError: There is none, there are several, or it can't work under DeepSpeed.
    """
    lightnings = package_of(module).core.optimizer
    optimizers, schedulers = lightnings._init_optimizers_and_lr_schedulers(module)
    if len(optimizers) > 1 or len(schedulers) > 1:
        raise UnsupportedFeatureError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers: DeepSpeed "
            "takes one, and at most one scheduler. Make one optimizer with several parameter groups, each with "
            "its own lr and hyper-parameters, and chain schedulers (torch.optim.lr_scheduler.ChainedScheduler). Models "
            "that are trained in turn, as in a GAN, need a fit each, or strategy='ddp'."
        )
    if isinstance(optimizers[0], lightnings._MockOptimizer):
        raise UnsupportedFeatureError(
            "configure_optimizers returned no optimizer: DeepSpeed can't train without. Return one, with lr=0 where "
            "nothing is to be learned, or run trainer.validate instead of fit."
        )
    refuse_lbfgs(optimizers[0])
    return optimizers[0], schedulers[0] if schedulers else None


def refuse_lbfgs(optimizer: object) -> None:
    """Refuse an optimizer that calls a closure several times per step.

    Args:
        optimizer: The user's.

    Raises:
        UnsupportedFeatureError: It is torch's LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise UnsupportedFeatureError(
            "The optimizer is LBFGS, which evaluates the model several times per step: DeepSpeed can't. "
            "Take AdamW, SGD or another optimizer whose step takes no closure, or train with strategy='auto'."
        )


def _check_overridden(module: Any) -> None:
    name = type(module).__name__
    if is_overridden("backward", module, package_of(module).LightningModule):
        raise UnsupportedFeatureError(
            f"{name}.backward: DeepSpeed runs backward itself, and would ignore this method. Scale or add up losses in "
            "training_step, or set automatic_optimization=False and call self.manual_backward(loss)."
        )
    for hook, found in _uses_of_gradients(module):
        rank_zero_warn(
            f"{hook} uses {', '.join(sorted(found))}: under ZeRO Stage 3 p.grad is None there, so nothing is read, "
            "changed or clipped. Norms: lightning_zero3.grad_norms(pl_module). Clipping: Trainer(gradient_clip_val). "
            "Single gradients: deepspeed.utils.safe_get_full_grad(parameter) and safe_set_full_grad(parameter, value)."
        )


def _uses_of_gradients(module: Any) -> Iterator[tuple[str, set[str]]]:
    """Hooks of the module and its callbacks whose code refers to gradients, as far as it can be read."""
    pl = package_of(module)
    own: list[tuple[Any, type[Any], str, set[str]]] = [
        (module, pl.LightningModule, hook, _READS_GRADIENTS) for hook in _GRADIENT_HOOKS
    ]
    own.append((module, pl.LightningModule, "training_step", _CLIPS))
    for callback in module.trainer.callbacks:
        if not type(callback).__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_zero3.")):
            own += [(callback, pl.callbacks.Callback, hook, _READS_GRADIENTS) for hook in _GRADIENT_HOOKS[:3]]
    for holder, parent, hook, names in own:
        method: Callable[..., Any] | None = getattr(type(holder), hook, None)
        if method is None or method is getattr(parent, hook, None) or not inspect.isfunction(inspect.unwrap(method)):
            continue
        found = names & referenced_names(method)
        if found:
            yield f"{type(holder).__name__}.{hook}", found
