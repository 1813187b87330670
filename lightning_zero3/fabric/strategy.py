# SPDX-License-Identifier: Apache-2.0
"""``Zero3FastFabricStrategy``: Fabric's hooks, in the order in which a user's loop reaches them.

Upstream symbols (Lightning 2.6.6): ``DeepSpeedStrategy.setup_environment`` and ``_setup_distributed``, which refuse
anything but CUDA; ``_set_world_ranks``, ``_init_deepspeed_distributed``, ``_format_config`` and
``_config_initialized``, of which these are made; ``_deepspeed_engine`` and
``_set_deepspeed_activation_checkpointing``, which belong to the set-up that is ours here; ``_backward_sync_control``,
which allows ``no_backward_sync``; ``convert_module`` of one Fabric's precision plugin. Fabric has no other places for
them. Detected by tests. Expires when Lightning allows CPUs and an engine of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from torch import nn

from lightning_zero3 import ds_config, engine_end, precision, refusals, same_batches
from lightning_zero3.config import ConfigConflictError, SetupError
from lightning_zero3.engine_setup import EngineSetup
from lightning_zero3.fabric.checkpoints import FabricCheckpoints
from lightning_zero3.fabric.steps import SteppedEngine, SteppedOptimizer
from lightning_zero3.moe import parallel_layers, peer_batches, router
from lightning_zero3.moe.build import refuse_meta_tensors
from lightning_zero3.moe.generation import ranks_in_step
from lightning_zero3.strategy_options import OptionsOfAStrategy

_REMEDY = (
    "Under ZeRO Stage 3 every rank must run the same number of batches, since each forward gathers weights from all "
    "ranks. Split the data evenly, pad or drop the rest, or leave the loop on all ranks at the same batch."
)
# What Fabric's user writes in place of what messages for the Trainer's say. Both take the same arguments.
_WORDS = (
    ("Trainer(", "Fabric("),
    ("The Trainer", "Fabric"),
    ("the Trainer", "Fabric"),
    ("trainer.", "fabric."),
    ("the LightningModule's __init__ or configure_model", "its class or under fabric.init_module()"),
    ("in configure_model", "under fabric.init_module()"),
)


@contextmanager
def _in_fabrics_words() -> Iterator[None]:
    """Have errors about a Trainer's arguments speak of Fabric's, which have the same names."""
    try:
        yield
    except (SetupError, refusals.UnsupportedFeatureError) as error:
        said = str(error)
        for theirs, ours in _WORDS:
            said = said.replace(theirs, ours)
        error.args = (said,)
        raise


class FabricStrategy(FabricCheckpoints, EngineSetup, OptionsOfAStrategy):
    """Mixin over the ``DeepSpeedStrategy`` of either of Lightning's packages that have a Fabric."""

    caller = "Fabric"
    # Lightning's.
    accelerator: Any
    cluster_environment: Any
    _timeout: timedelta | None
    _config_initialized: bool
    _deepspeed_engine: Any
    _backward_sync_control: Any
    # Ours.
    _last_stepped: SteppedEngine | None = None
    _more_to_come = False
    _being_set_up: nn.Module | None = None
    _while_set_up: ExitStack | None = None

    # ------------------------------------------------------------ fabric.launch()

    @_in_fabrics_words()
    def setup_environment(self) -> None:
        """Check everything that can be known, then set up the device and the process group.

        Raises:
            ConfigConflictError: Entries of the config differ from each other or from the precision.
            SetupError: A parallel size doesn't fit the ranks, or there is nothing to verify.
            RuntimeError: The accelerator isn't supported, or isn't the one that DeepSpeed was imported for.
        """
        if self.options.async_save:
            raise SetupError(
                "async_save=True: with Fabric a save ends before fabric.save returns, since nothing of Fabric's comes "
                "after it that could commit it. Leave it out."
            )
        plugin: Any = self.precision  # type: ignore[attr-defined]
        self._check_accelerator()
        precision.require_deepspeed_precision(plugin)
        if not self._config_initialized:
            ds_config.settle_without_trainer(
                self.config,
                world_size=self.world_size,
                precision=plugin.precision,
                clip=self.options.stock_semantics,
            )
        if self.options.verify_parallel:
            parallel_layers.refuse_nothing_to_verify(self.config)
        parallel_layers.topology_of(self.config, self.world_size)
        if "convert_module" not in vars(plugin):
            # On this Fabric's plugin only; Fabric calls it first of all in setup.
            convert = precision.converting(plugin, self.config, stock_semantics=self.options.stock_semantics)
            plugin.convert_module = partial(self._convert, convert)
        if not self.options.stock_semantics:
            self._backward_sync_control = self
        # DeepSpeedStrategy's own method refuses anything but CUDA; its base class sets up the environment for any.
        super(self.upstream, self).setup_environment()  # type: ignore[misc]

    def _setup_distributed(self) -> None:
        with self._making_process_group():
            if self.root_device.type == "cuda":
                super()._setup_distributed()  # type: ignore[misc]
                return
            strategy: Any = self
            # The same as Lightning's, less its check of GPU indices, which CPU devices fail.
            reset_seed()
            strategy._set_world_ranks()
            strategy._init_deepspeed_distributed()
            if not self._config_initialized:
                strategy._format_config()
                self._config_initialized = True

    # ------------------------------------------------------------ fabric.init_module(), fabric.setup()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """What ``fabric.init_module()`` is: each module is partitioned as it is built, with a whole model's values.

        Args:
            empty_init: Without effect, but with ``stock_semantics``.
        """
        if self.options.stock_semantics:
            stock: AbstractContextManager[Any] = super().module_init_context(empty_init)  # type: ignore[misc]
            return stock
        return self._sharded_build()

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """As :meth:`module_init_context`."""
        return self.module_init_context()

    @_in_fabrics_words()
    def _convert(self, convert: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
        """Fabric's first call in setup."""
        refuse_meta_tensors(module)
        refusals.refuse_compiled(module)
        self._being_set_up = module
        return convert(module)

    def module_to_device(self, module: nn.Module) -> None:
        """Leave a module that is being set up where it is: the engine partitions it there, and moves the partitions.

        Args:
            module: The module.
        """
        if module is not self._being_set_up or self.options.stock_semantics:
            super().module_to_device(module)  # type: ignore[misc]

    @_in_fabrics_words()
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Build the engine that trains a module.

        Args:
            module: The module.
            optimizers: One optimizer over its parameters.
            scheduler: The user's, who steps it. With ``stock_semantics`` it is the engine's.

        Returns:
            The engine, the optimizer for Fabric to wrap, and the scheduler.

        Raises:
            UnsupportedFeatureError: Several optimizers, or one that can't work under DeepSpeed.
            ConfigConflictError: The config names an optimizer too.
            SetupError: Layers can't be shared out as asked.
        """
        stock = self.options.stock_semantics
        self._check_optimizers(optimizers)
        self._check_module(module)
        if self.options.router_bias_update_speed is not None:
            router.find_routers(module)  # before it is partitioned and placed
        engine, built = self._training_engine(module, optimizers[0], scheduler if stock else None)
        self._adopt(engine)
        self._set_deepspeed_activation_checkpointing()  # type: ignore[attr-defined]
        if stock:
            return engine, [built], engine.lr_scheduler
        stepped = SteppedEngine(engine, self.options.router_bias_update_speed)
        self._stepped = (*self._stepped, stepped)
        return engine, [SteppedOptimizer(stepped)], scheduler

    @_in_fabrics_words()
    def setup_module(self, module: nn.Module) -> Any:
        """Build the engine that evaluates a module, or go on with the one that trains it.

        Args:
            module: The module.
        """
        self._check_module(module)
        self._adopt(self._evaluating_engine(module))
        return self._deepspeed_engine

    def _check_optimizers(self, optimizers: list[Any]) -> None:
        if len(optimizers) != 1:
            raise refusals.UnsupportedFeatureError(
                f"fabric.setup(model, ...) got {len(optimizers)} optimizers: DeepSpeed takes one. Make one optimizer "
                "with several parameter groups, each with its own lr and hyper-parameters; models that are trained in "
                "turn are set up one by one, each with its optimizer."
            )
        refusals.refuse_lbfgs(optimizers[0])
        if "optimizer" in self.config:
            raise ConfigConflictError(
                "The DeepSpeed config names an optimizer, and fabric.setup(model, optimizer) was given another: leave "
                "the section 'optimizer' out of the config."
            )

    def _check_module(self, module: nn.Module) -> None:
        self._being_set_up = None
        refuse_meta_tensors(module)
        self._check_layers_of_an_earlier_engine(module)

    def _adopt(self, engine: Any) -> None:
        """Make an engine the one that ``fabric.backward(loss)`` and ``strategy.model`` mean."""
        self._deepspeed_engine = engine
        self._while_set_up = self._while_set_up or ExitStack()
        for stepped in self._stepped:
            if engine_end.has_ended(stepped.engine):
                stepped.close()
        self._stepped = tuple(each for each in self._stepped if not engine_end.has_ended(each.engine))
        if not self.options.stock_semantics:
            # For good: Fabric has no end.
            self._while_set_up.enter_context(ranks_in_step(engine.module, self.world_size))
            peer_batches.compare_first_inputs(engine.module, self.parallel_layout)

    # ------------------------------------------------------------ fabric.setup_dataloaders()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed workers by the shard that they read, and make sure that all ranks have the same number of batches.

        Args:
            dataloader: A loader with the sampler that it is used with.
        """
        processed: Any = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self.options.stock_semantics or self.world_size == 1:
            return processed
        seeds = getattr(processed, "worker_init_fn", None)
        if isinstance(seeds, partial) and seeds.func is pl_worker_init_function:
            # Fabric's, by the global rank: tensor-parallel peers' workers would augment the same samples differently.
            processed.worker_init_fn = partial(pl_worker_init_function, rank=self.distributed_sampler_kwargs["rank"])
        return same_batches.compared(
            processed,
            sized_len(processed),
            prefix="Fabric",
            remedy=_REMEDY,
            timeout=self._timeout,
            may_end_early=True,
        )

    # ------------------------------------------------------------ fabric.backward(), optimizer.step()

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool) -> Iterator[None]:
        """What ``fabric.no_backward_sync(model)`` is: gradients add up in any case, and are reduced each time.

        Args:
            module: The engine.
            enabled: Whether the backward inside isn't a step's last.

        Raises:
            SetupError: The engine counts micro-steps by itself.
        """
        stepped = self._of(module)
        if enabled and stepped is not None and stepped.counts:
            raise SetupError(
                "fabric.no_backward_sync(...), but the DeepSpeed config sets gradient_accumulation_steps to "
                f"{module.gradient_accumulation_steps()}, so the engine counts micro-steps by itself. Leave one of "
                "them out."
            )
        before, self._more_to_come = self._more_to_come, enabled
        try:
            yield
        finally:
            self._more_to_come = before

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, by the engine; see :class:`~lightning_zero3.fabric.steps.SteppedEngine`.

        Args:
            tensor: The loss.
            module: The engine.
            *args: For the engine's backward.
            **kwargs: For the engine's backward.

        Raises:
            RuntimeError: The module was set up without an optimizer, or its engine has ended.
        """
        if self.options.stock_semantics:
            super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]
            return
        stepped = self._of(module)
        if stepped is None:
            raise RuntimeError(
                "fabric.backward(loss) of a model that was set up without an optimizer, or that a later setup has "
                "taken over. Set it up by model, optimizer = fabric.setup(model, optimizer)."
            )
        with stepped.backward(self._more_to_come) as how:
            super().backward(tensor, module, *args, **{**how, **kwargs})  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take a step of the engine whose optimizer this is, or count a micro-step.

        Args:
            optimizer: What was wrapped by Fabric.
            **kwargs: ``closure``, if any.
        """
        if self.options.stock_semantics:
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        self._last_stepped = optimizer.stepped
        return optimizer.step(**kwargs)

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether the last ``optimizer.step()`` changed nothing, because a gradient was infinite or no number."""
        return self._last_stepped is not None and self._last_stepped.last_step_was_skipped

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Have the next step clip; see :meth:`lightning_zero3.fabric.steps.SteppedEngine.clip`.

        Args:
            module: The engine.
            optimizer: What was wrapped by Fabric.
            max_norm: The most that the norm of all gradients may be.
            norm_type: 2.
            error_if_nonfinite: Whether a norm that is no finite number is an error.

        Returns:
            The norm before clipping.
        """
        if self.options.stock_semantics:
            stock: torch.Tensor = super().clip_gradients_norm(module, optimizer, max_norm)  # type: ignore[misc]
            return stock
        clipped: torch.Tensor = optimizer.stepped.clip(max_norm, norm_type, error_if_nonfinite)
        return clipped

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float | int) -> NoReturn:  # noqa: ARG002
        """Refused.

        Args:
            module: The engine.
            optimizer: What was wrapped by Fabric.
            clip_val: The value.

        Raises:
            UnsupportedFeatureError: Always.
        """
        raise refusals.UnsupportedFeatureError(
            f"clip_gradients(clip_val={clip_val}): DeepSpeed clips by the norm of all gradients only. Pass max_norm."
        )


class Zero3FastFabricStrategy(FabricStrategy, DeepSpeedStrategy):
    """:class:`~lightning_zero3.Zero3FastStrategy` for Fabric: the same engine, the same optimizer, the same numbers.

    Registered as ``Fabric(strategy="zero3_fast")``, and as ``"zero3_fast_offload"`` with the optimizer on the CPU.
    docs/fabric.md says what each of Fabric's methods does here.

    Args:
        config: A DeepSpeed config dict or a path to one in JSON, as for ``Zero3FastStrategy``.
        **options: The options of :class:`~lightning_zero3.Zero3Options`, and any argument of
            ``lightning.fabric.strategies.DeepSpeedStrategy`` but ``stage`` and ``zero_optimization``.

    Raises:
        ConfigConflictError: ``config`` and an argument or option differ.
        TypeError: An unknown argument, or an option of the wrong type.
        ValueError: An option out of range.
    """

    upstream = DeepSpeedStrategy
