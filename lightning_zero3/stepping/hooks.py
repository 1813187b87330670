# SPDX-License-Identifier: Apache-2.0
"""When a step is taken and whether it counts: the Lightning hooks of ``Zero3FastStrategy`` that are about that.

Upstream symbols (Lightning 2.6.6): ``fit_loop._should_accumulate`` (read), ``handles_gradient_accumulation`` and
``block_backward_sync``, because stock's engine counts micro-batches beside Lightning's loop, and divides a loss that
was divided; ``on_train_start`` of one fit's ``GradientAccumulationScheduler``. Detected by tests against a plain
Trainer. Expires when Lightning's DeepSpeed strategy follows its own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_zero3.lightning_packages import package_of
from lightning_zero3.moe import router
from lightning_zero3.moe.expert_parallel import holds_a_model
from lightning_zero3.stepping import micro_steps
from lightning_zero3.stepping.accumulation_schedule import allow_schedules
from lightning_zero3.stepping.skipped_steps import SkippedSteps
from lightning_zero3.substitution import substituted
from lightning_zero3.trainer_mixin import TrainerMixin


class SteppingStrategy(TrainerMixin):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: a plain Trainer's steps; with ``stock_semantics``, Lightning's."""

    _micro_steps: micro_steps.MicroSteps | None = None
    _skipped_steps: SkippedSteps | None = None
    _router_biases: router.RouterBiases | None = None
    _for_this_fit: ExitStack | None = None

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the optimizer is called after every micro-batch, to decide by itself when to step.

        Stock's is: the engine counts micro-batches across epochs, Lightning within one, and the two disagree where an
        epoch's batches aren't divisible. Here Lightning decides, and :meth:`backward` tells the engine.
        """
        return self.options.stock_semantics

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing: Stage 3 reduces every micro-batch's gradients, and the engine's ``no_sync`` refuses to work."""
        yield

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, with one division of the loss by the number of micro-batches, and one count of them.

        Args:
            closure_loss: A micro-batch's loss, divided by their number by Lightning.
            optimizer: As Lightning's.
            *args: For the engine's backward.
            **kwargs: For the engine's backward.
        """
        if self._micro_steps is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        last = not self.lightning_module.trainer.fit_loop._should_accumulate() if automatic else None
        with self._micro_steps.backward(last):
            return super().backward(closure_loss, optimizer, *args, **{"scale_wrt_gas": False, **kwargs})

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As Lightning's; a step that the engine skips doesn't count, and routers' biases move after one that it takes.

        Args:
            optimizer: The optimizer.
            closure: Forward and backward, with automatic optimization.
            model: As Lightning's.
            **kwargs: For the engine's step.

        Raises:
            EndlessSkippingError: Too many steps in a row were skipped.
        """
        if self._micro_steps is None or self._skipped_steps is None:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._move_router_biases()
            return result
        assert self.lightning_module is not None
        steps, automatic = self._micro_steps, self.lightning_module.automatic_optimization

        def closure_and_close() -> Any:
            result = closure()
            if not automatic:
                steps.close()
            return result

        result = super().optimizer_step(optimizer, closure_and_close, model, **kwargs)
        self._move_router_biases()
        self._skipped_steps.step_ended()
        return result

    def _check_router_biases(self) -> None:
        """Before process groups, where the model is built already."""
        module = self.lightning_module
        if self.options.router_bias_update_speed is None or module is None:
            return
        built = holds_a_model(module) or not is_overridden(
            "configure_model", module, package_of(module).LightningModule
        )
        if built and module.trainer.state.fn == TrainerFn.FITTING:
            router.find_routers(module)

    def _move_router_biases(self) -> None:
        if self._router_biases is not None:
            self._router_biases.step_ended()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As Lightning's.

        Args:
            batch: The batch.
            batch_idx: Its index in the epoch.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._skipped_steps is not None:
            self._skipped_steps.batch_starts()

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether the optimizer step of this batch was skipped, for schedulers under manual optimization."""
        return self._skipped_steps is not None and self._skipped_steps.last_was_skipped

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's, with the engine's micro-steps and the token counts of a step that isn't complete.

        Args:
            checkpoint: What Lightning saves.
            filepath: Where.
            storage_options: As Lightning's.
        """
        if self._micro_steps is not None:
            checkpoint = {**checkpoint, micro_steps.SAVED: self._micro_steps.saved_state()}
        if self._router_biases is not None:
            checkpoint = {**checkpoint, router.SAVED: self._router_biases.saved_state()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's, with what :meth:`save_checkpoint` adds.

        Args:
            checkpoint_path: Where.
            weights_only: As Lightning's.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._micro_steps is not None:
            self._micro_steps.restore(checkpoint.get(micro_steps.SAVED))
        if self._router_biases is not None:
            self._router_biases.restore(checkpoint)
        return checkpoint

    def teardown(self) -> None:
        """As Lightning's; the Trainer's loops and callbacks get their own methods back."""
        if self._for_this_fit is not None:
            self._for_this_fit.close()
        if self._router_biases is not None:
            self._router_biases.close()
        self._micro_steps = self._skipped_steps = self._for_this_fit = self._router_biases = None
        super().teardown()

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        speed = self.options.router_bias_update_speed
        if speed is not None:
            router.find_routers(model)  # a model that was built meanwhile, before it is partitioned and placed
        super()._initialize_deepspeed_train(model)
        if speed is not None:
            self._router_biases = router.RouterBiases(self.model, speed)
        if self.options.stock_semantics:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for wrapper in self._lightning_optimizers:
            micro_steps.reach_the_optimizer(wrapper)
        self._micro_steps = micro_steps.MicroSteps(self.model)
        self._skipped_steps = SkippedSteps(trainer, self.model)
        self._for_this_fit = ExitStack()
        self._for_this_fit.callback(self._skipped_steps.close)
        for schedule, start in allow_schedules(trainer):
            self._for_this_fit.enter_context(substituted(schedule, "on_train_start", start))
