"""Which engine validate, test and predict run in, and what is loaded for them: Lightning's hooks about that.

A module's own engine goes on being used where it computes what was asked for: after fit that is the training engine, so
results are those of a validation inside fit, nothing is built, and a checkpoint can be saved afterwards. Else an engine
without an optimizer is built, with the layers and the precision of a fit: it holds 2 or 4 bytes per parameter, where
one for training holds 10 to 20.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import lightning
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_zero3 import ds_config, engine_end
from lightning_zero3.checkpoints import loading
from lightning_zero3.checkpoints.sharded_weights import client_state
from lightning_zero3.config import SetupError, Zero3Options
from lightning_zero3.moe import expert_parallel, parallel_layers, tensor_parallel
from lightning_zero3.moe.generation import ranks_in_step
from lightning_zero3.topology import Topology

# What Lightning can't resume without.
_LIGHTNINGS = ("pytorch-lightning_version", "loops", "lr_schedulers")
_SECTIONS = ("expert_parallel", "tensor_parallel")


class EvaluatingStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` with an evaluation that equals the one inside fit."""

    options: Zero3Options
    # The engine that this strategy has set up, or goes on using.
    _mine: Any = None
    _while_set_up: ExitStack | None = None

    def setup(self, trainer: Any) -> None:
        """As Lightning's; an engine of another module, from an earlier run of this Trainer, is given up.

        Args:
            trainer: The Trainer.
        """
        if self._mine is not None and self._mine.module is not self.lightning_module:
            engine_end.end(self._mine)
        if self._mine is not None and engine_end.has_ended(self._mine):
            self._mine, self.optimizers, self.lr_scheduler_configs = None, [], []
        super().setup(trainer)
        self._mine = self.model
        assert self.lightning_module is not None
        self._while_set_up = ExitStack()
        self._while_set_up.enter_context(ranks_in_step(self.lightning_module, self.world_size))

    def teardown(self) -> None:
        """As Lightning's; the engine stays, to be saved from, until another run needs the module."""
        if self._while_set_up is not None:
            self._while_set_up.close()
            self._while_set_up = None
        super().teardown()

    def _layers_for(self, model: nn.Module) -> tuple[Any, Any, dict[str, Any]]:
        """The models that AutoEP and AutoTP work on, or have worked on, and the config with what was found out."""
        assert isinstance(self.config, dict)
        before = engine_end.engine_of(model)
        if before is None or (before.experts is None and before.split is None):
            return parallel_layers.targets(model, self.config, self.world_size)
        found = {name: before.config[name] for name in _SECTIONS if name in before.config}
        return before.experts, before.split, {**self.config, **found}

    def _check_layers_of_an_earlier_engine(self, module: nn.Module) -> bool:
        """Whether layers are shared out already; they must be as this Trainer asks.

        Raises:
            SetupError: They aren't, or it isn't known how they are.
        """
        before = engine_end.engine_of(module)
        replaced = expert_parallel.already_replaced(module) or tensor_parallel.already_split(module)
        if not replaced:
            return False
        assert isinstance(self.config, dict)
        asked = _sizes(self.config)
        made = None if before is None else _sizes(before.config)
        if asked != made:
            shown = "an engine that isn't zero3_fast's" if made is None else f"an earlier run with {_said(made)}"
            raise SetupError(
                f"{type(module).__name__}'s layers are shared out by {shown}, and this Trainer has {_said(asked)}. "
                "Pass the same sizes, or build the module anew and load a checkpoint."
            )
        return True

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        from lightning_zero3.engine import build_inference_engine

        experts, split, config = self._layers_for(model)
        config = ds_config.inference_config(config)
        before = engine_end.engine_of(model)
        if before is not None and not engine_end.has_ended(before.engine) and before.config == config:
            # Lightning's teardown has moved buffers and what was gathered to the CPU.
            model.to(self.root_device)
            self.model = before.engine
            return
        self.model = build_inference_engine(
            model, config=config, local_rank=self._device_index, target=experts, split=split
        )
        self._guard_loading(self.model)

    def _guard_loading(self, engine: Any) -> None:
        loading.guard(engine, self._layout, trust=self.options.trust_checkpoint)

    @property
    def _layout(self) -> Topology:
        assert isinstance(self.config, dict)
        return parallel_layers.topology_of(self.config, self.world_size)

    @property
    def _device_index(self) -> int:
        """The GPU's index; a CPU has none, and DeepSpeed's engine wants a number all the same."""
        return self.local_rank if self.root_device.index is None else self.root_device.index

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's, with everything looked at first; for an evaluation weights alone, sharded ones too.

        Args:
            checkpoint_path: A folder, or a tag's own folder in one; a file with ``load_full_weights=True``.
            weights_only: Of fit, validate, test and predict: False reads the checkpoint without a restriction, True
                with it, None as ``trust_checkpoint`` says.

        Raises:
            DamagedCheckpointError: A file isn't what was saved.
            UntrustedCheckpointError: A file holds something that would have to be run to be read.
            UnfitCheckpointError: The checkpoint isn't of this module or this layout of ranks, or there is none.
            SetupError: It is a Universal Checkpoint.
        """
        module = self.lightning_module
        assert module is not None
        assert isinstance(self.config, dict)
        if weights_only is None:
            weights_only = _asked_of(module.trainer)
        trust = self.options.trust_checkpoint if weights_only is None else not weights_only
        if self.load_full_weights:
            path, load = self.broadcast(checkpoint_path), super(DeepSpeedStrategy, self).load_checkpoint
            return loading.read_single_file(path, lambda only: load(path, only), trust=trust)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if not fitting and self.config.get("checkpoint", {}).get("load_universal"):
            raise SetupError(
                "checkpoint.load_universal is set in the DeepSpeed config: a Universal Checkpoint is loaded by fit "
                "only. Leave it out and evaluate the sharded checkpoint that it was made of, or validate inside fit."
            )
        if fitting:
            _, state = loading.load(
                self.model,
                checkpoint_path,
                load_lr_scheduler_states=False,
                load_module_strict=module.strict_loading,
                layout=self._layout,
                trust=trust,
                needs=_LIGHTNINGS,
            )
            return state
        place = loading.find_together(checkpoint_path)
        strict = module.strict_loading
        model = loading.read_weights(module, place, self._layout, self.global_rank, strict=strict, trust=trust)
        # An engine's own save_checkpoint doesn't know of it; there are weights, and no more is wanted.
        return {_LIGHTNINGS[0]: lightning.__version__, **client_state(model)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's.

        Args:
            checkpoint: What Lightning saves.
            filepath: Where.
            storage_options: As Lightning's.

        Raises:
            RuntimeError: This Trainer has no engine with an optimizer (any more).
        """
        self._require_something_to_save()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As Lightning's, which asks before it calls :meth:`save_checkpoint`.

        Args:
            optimizer: An optimizer of this Trainer.
        """
        self._require_something_to_save()
        return super().optimizer_state(optimizer)

    def _require_something_to_save(self) -> None:
        if not hasattr(self.model, "save_checkpoint") or not engine_end.has_optimizer(self.model):
            gone = self.model is not None and engine_end.has_ended(self.model)
            raise RuntimeError(
                "This Trainer's engine has ended: a later run has taken over its module. Save before that run starts, "
                "or from the later run's Trainer."
                if gone
                else "There is nothing to save here: a sharded checkpoint holds optimizer states, and this Trainer has "
                "only evaluated this module. Save from the Trainer that has trained it."
            )


def _asked_of(trainer: Any) -> bool | None:
    """What ``fit``, ``validate``, ``test`` or ``predict`` was given as ``weights_only``.

    Upstream symbol: ``Trainer._run``, which passes it on only where a checkpoint is restored before the strategy is set
    up, and with DeepSpeed it is afterwards (Lightning 2.6.6). Detected by a test. Expires when it passes it on always.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not type(trainer)._run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weights_only")


def _sizes(config: Any) -> tuple[int | None, int]:
    experts, tensors = ds_config.expert_parallel_section(config), ds_config.tensor_parallel_section(config)
    return (
        None if experts is None else experts.get("autoep_size", 1),
        1 if tensors is None else tensors.get("autotp_size", 1),
    )


def _said(sizes: tuple[int | None, int]) -> str:
    return f"expert_parallel_size={sizes[0]} and tensor_parallel_size={sizes[1]}"
