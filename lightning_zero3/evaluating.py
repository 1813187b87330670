"""Which engine validate, test and predict run in, and what is loaded for them: Lightning's hooks about that.

A module's own engine goes on being used where it computes what was asked for: after fit that is the training engine, so
results are those of a validation inside fit, nothing is built, and a checkpoint can be saved afterwards. Else an engine
without an optimizer is built, with the layers and the precision of a fit: it holds 2 or 4 bytes per parameter, where
one for training holds 10 to 20.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero3 import engine_end
from lightning_zero3.config import SetupError, Zero3Options
from lightning_zero3.moe import parallel_layers
from lightning_zero3.moe.generation import ranks_in_step

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DeepSpeedStrategy as _Strategy
else:
    _Strategy = object


class EvaluatingStrategy(_Strategy):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: an evaluation that equals the one inside fit."""

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

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's in fit; for an evaluation, weights alone, from a sharded checkpoint too.

        Args:
            checkpoint_path: A folder, or a file with ``load_full_weights=True``.
            weights_only: As Lightning's.

        Raises:
            UnfitCheckpointError: The checkpoint's weights don't belong to this module or this layout of ranks.
            SetupError: It is a Universal Checkpoint.
        """
        from lightning.pytorch.strategies.deepspeed import _validate_checkpoint_directory  # type: ignore[attr-defined]

        from lightning_zero3.checkpoints.sharded_weights import load_sharded

        module = self.lightning_module
        assert module is not None
        assert isinstance(self.config, dict)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if fitting or self.load_full_weights or self.options.stock_semantics:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if self.config.get("checkpoint", {}).get("load_universal"):
            raise SetupError(
                "checkpoint.load_universal is set in the DeepSpeed config: a Universal Checkpoint is loaded by fit "
                "only. Leave it out and evaluate the sharded checkpoint that it was made of, or validate inside fit."
            )
        _validate_checkpoint_directory(checkpoint_path)
        layout = parallel_layers.topology_of(self.config, self.world_size)
        return load_sharded(module, checkpoint_path, layout, self.global_rank, strict=module.strict_loading)
