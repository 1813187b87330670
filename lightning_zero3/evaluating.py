# SPDX-License-Identifier: Apache-2.0
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

from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero3 import engine_end
from lightning_zero3.checkpoints import loading
from lightning_zero3.checkpoints.sharded_weights import client_state
from lightning_zero3.checkpoints.single_file import read_single_file
from lightning_zero3.config import SetupError
from lightning_zero3.moe.generation import ranks_in_step
from lightning_zero3.trainer_mixin import TrainerMixin


class EvaluatingStrategy(TrainerMixin):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: an evaluation that equals the one inside fit."""

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
            path, load = self.broadcast(checkpoint_path), super(self.upstream, self).load_checkpoint
            return read_single_file(path, lambda only: load(path, only), trust=trust)
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
                layout=self.parallel_layout,
                trust=trust,
                any_layout=self.options.resume_layout is not None,
            )
            return state
        place = loading.find_together(checkpoint_path)
        strict = module.strict_loading
        model = loading.read_weights(module, place, self.parallel_layout, self.global_rank, strict=strict, trust=trust)
        return client_state(model)


def _asked_of(trainer: Any) -> bool | None:
    """What ``fit``, ``validate``, ``test`` or ``predict`` was given as ``weights_only``.

    Upstream symbol: ``Trainer._run``, which passes it on only where a checkpoint is restored before the strategy is set
    up, and with DeepSpeed it is afterwards (Lightning 2.6.6). Detected by a test. Expires when it passes it on always.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not type(trainer)._run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weights_only")
