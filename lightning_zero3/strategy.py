"""``Zero3FastStrategy``: Lightning's hooks, in the order in which a Trainer calls them, each delegating to one room."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero3 import (
    build_locks,
    cpu_ops,
    ds_config,
    engine_end,
    group_timeouts,
    loaders,
    precision,
    process_exit,
    refusals,
    same_batches,
)
from lightning_zero3.checkpoints.consolidated import load_consolidated
from lightning_zero3.config import ConfigConflictError, Zero3Options
from lightning_zero3.evaluating import EvaluatingStrategy
from lightning_zero3.moe import auxiliary_loss, expert_parallel, parallel_layers
from lightning_zero3.moe.build import meta_tensors, refuse_meta_tensors
from lightning_zero3.moe.peer_batches import PeerBatchesStrategy
from lightning_zero3.moe.sharded_build import sharded_build
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.stepping import SteppingStrategy
from lightning_zero3.substitution import substituted

# torch 2.13 on the collectives that DeepSpeed 0.19.8 uses. Expires when DeepSpeed calls their new names.
DEPRECATED_CALLS = r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated"


class Zero3FastStrategy(PeerBatchesStrategy, SteppingStrategy, EvaluatingStrategy):
    """ZeRO Stage 3 with a faster, leaner optimizer step, and expert parallelism for Hugging Face MoE models.

    A drop-in for ``Trainer(strategy="deepspeed_stage_3")``: registered as ``"zero3_fast"``, and as
    ``"zero3_fast_offload"`` with the optimizer on the CPU. Runs on CUDA GPUs, and on CPUs with gloo.

    Args:
        config: A DeepSpeed config dict or a path to one in JSON. It is copied, never changed. Where it is silent,
            arguments and options fill it in; where it and they differ, :class:`ConfigConflictError` names both.
        scoped_grad_clear: Visit each parameter once per optimizer step to clear gradients, instead of once per
            sub-group. Where the installed DeepSpeed clears once per step (0.19.8), its own clear is used.
        alias_master_weights: Let a sub-group's weight partition be its master copy where the two would be identical
            (same dtype, same device, nothing offloaded): plain fp32, torch autocast over fp32 weights, bf16 masters.
            Saves 4 (fp32) or 2 (bf16) bytes per parameter.
        coalesce_grad_norms: Compute the gradient norms of all sub-groups together, with one reduction per process
            group instead of one or two per sub-group.
        batch_optimizer_step: Call the optimizer once for many sub-groups, where it is known to treat each tensor for
            itself: torch's Adam, AdamW and SGD, DeepSpeed's FusedAdam and CPUAdam. Any other optimizer, offload,
            ZenFlow and Muon take upstream's step.
        coalesce_persistent_gather: Gather the persistent parameters after the step by one collective per process group
            and dtype, instead of one per parameter.
        skip_redundant_release: Before the step, release only parameters that are still gathered, in one pass.
        step_bytes_budget: Bytes of gradients, in the masters' dtype, that one call to the optimizer updates; at least
            one sub-group's. ``None``: as many as fit in memory that is idle during the step (the reduction bucket),
            such that the step's peak is no higher than stock's.
        expert_parallel_size: Number of ranks that share one set of experts. ``None`` leaves the model's MoE layers as
            they are; 1 replaces them by AutoEP's layers with all experts on every rank. It must divide the number of
            ranks and of experts.
        expert_parallel_preset: Name of DeepSpeed's AutoEP preset; ``None`` resolves it from the model's config.
        router_bias_update_speed: How far a router's correction bias (``e_score_correction_bias``) moves after each
            optimizer step, to even out the experts' loads without an auxiliary loss, as DeepSeek-V3, GLM-4.5 and
            MiniMax do (0.001, and 0 near the end of training). ``None`` leaves biases as they are. Works with and
            without ``expert_parallel_size``.
        tensor_parallel_size: Number of consecutive ranks that share each layer and see the same data. ``None`` and 1
            leave layers whole. It must divide the number of ranks, of heads and the layers' widths.
        verify_parallel: Before training, compare logits, loss, auxiliary loss and every gradient of a small copy of the
            Hugging Face model, with this run's parallel sizes and DeepSpeed config, with plain Transformers on one
            process, within 1e-5 in fp32 (and what routers choose in bf16, where the run is in bf16), and raise
            ``DifferentMathematicsError`` on all ranks where they differ. Takes seconds; weights, memory and random
            states stay as they are. Needs ``expert_parallel_size`` or ``tensor_parallel_size``.
        stock_semantics: Give exactly ``deepspeed_stage_3``'s numbers, its known faults included: none of the
            corrections that docs/corrections.md lists is applied.
        trust_checkpoint: Read checkpoints without a restriction, as DeepSpeed does. Whatever code is in them is run:
            only for files whose every writer you trust. Without it, a checkpoint that holds anything but tensors, plain
            values and a short list of known classes is refused (docs/checkpoints.md).
        **deepspeed_arguments: Any other argument of ``lightning.pytorch.strategies.DeepSpeedStrategy`` but ``stage``
            and ``zero_optimization``. One that is at Lightning's default counts as not given.

    Raises:
        ConfigConflictError: ``config`` and an argument or option differ.
        TypeError: An unknown argument, or an option of the wrong type.
        ValueError: An option out of range.
    """

    strategy_name = "zero3_fast"

    def __init__(
        self,
        config: str | Path | dict[str, Any] | None = None,
        *,
        scoped_grad_clear: bool = True,
        alias_master_weights: bool = True,
        coalesce_grad_norms: bool = True,
        batch_optimizer_step: bool = True,
        coalesce_persistent_gather: bool = True,
        skip_redundant_release: bool = True,
        step_bytes_budget: int | None = None,
        expert_parallel_size: int | None = None,
        expert_parallel_preset: str | None = None,
        router_bias_update_speed: float | None = None,
        tensor_parallel_size: int | None = None,
        verify_parallel: bool = False,
        stock_semantics: bool = False,
        trust_checkpoint: bool = False,
        **deepspeed_arguments: Any,
    ) -> None:
        self.options = Zero3Options(
            scoped_grad_clear=scoped_grad_clear,
            alias_master_weights=alias_master_weights,
            coalesce_grad_norms=coalesce_grad_norms,
            batch_optimizer_step=batch_optimizer_step,
            coalesce_persistent_gather=coalesce_persistent_gather,
            skip_redundant_release=skip_redundant_release,
            step_bytes_budget=step_bytes_budget,
            expert_parallel_size=expert_parallel_size,
            expert_parallel_preset=expert_parallel_preset,
            router_bias_update_speed=router_bias_update_speed,
            tensor_parallel_size=tensor_parallel_size,
            verify_parallel=verify_parallel,
            stock_semantics=stock_semantics,
            trust_checkpoint=trust_checkpoint,
        )
        _refuse_fixed_arguments(deepspeed_arguments)
        _refuse_unknown_arguments(deepspeed_arguments)
        super().__init__(config=config, zero_optimization=True, stage=3, **deepspeed_arguments)
        # Without a dict of the user's, Lightning has built one from the arguments, and they can't differ.
        from_user = config is not None or self.DEEPSPEED_ENV_VAR in os.environ
        given = _not_at_default(deepspeed_arguments) if from_user else {}
        assert isinstance(self.config, dict)
        self.config = ds_config.complete(
            self.config, given, self.options, argument_defaults=_deepspeed_strategy_defaults()
        )
        self._quiet_timers = False
        self._groups_before_fit: list[Any] = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``zero3_fast`` and ``zero3_fast_offload``.

        Args:
            strategy_registry: Lightning's registry of strategy names.
        """
        strategy_registry.register(cls.strategy_name, cls, description="ZeRO Stage 3, fast step", override=True)
        strategy_registry.register(
            f"{cls.strategy_name}_offload",
            cls,
            description="ZeRO Stage 3, fast step, optimizer on the CPU",
            override=True,
            offload_optimizer=True,
        )

    def enable_step_timers(self) -> None:
        """Have DeepSpeed time forward, backward and step of each micro-step, without the lines it would print.

        Called by :class:`lightning_zero3.Zero3Monitor` before the engine is built. A ``wall_clock_breakdown`` in the
        user's own config keeps its lines.
        """
        assert isinstance(self.config, dict)
        if not self.config.get("wall_clock_breakdown", False):
            self.config["wall_clock_breakdown"] = True
            self._quiet_timers = True

    def offload_states(
        self, include: Collection[str] | None = None, pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move optimizer states from the device to the host, to make room between two trainings.

        Args:
            include: Any of ``"optim_states"``, ``"hp_params"``, ``"lp_params"``, ``"lp_grads"`` and
                ``"contiguous_grad_buffer"``; None means all. Where weights and masters are aliased, either of
                ``hp_params`` and ``lp_params`` moves both.
            pin_memory: Whether the host memory is page-locked.
            non_blocking: Whether copies may still run on return.

        Raises:
            ValueError: An unknown state.
            RuntimeError: There is no engine yet: call it during or after fit.
        """
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        known = [state.value for state in OffloadStateTypeEnum]
        for state in include or ():
            if state not in known:
                raise ValueError(f"include={list(include or ())}: {state!r} is none of {', '.join(known)}.")
        states = None if include is None else [OffloadStateTypeEnum(state) for state in include]
        self._engine().offload_states(include=states, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move offloaded states back to the device.

        Args:
            non_blocking: Whether copies may overlap; they are finished on return.

        Raises:
            RuntimeError: There is no engine yet: call it during or after fit.
        """
        self._engine().reload_states(non_blocking=non_blocking)

    def _engine(self) -> Any:
        if not hasattr(self.model, "offload_states") or not engine_end.has_optimizer(self.model):
            raise RuntimeError(
                "There is no DeepSpeed engine with an optimizer here, so no states to move: call this during or after "
                "fit, and before another run takes the module over."
            )
        return self.model

    def setup_environment(self) -> None:
        """Check everything that can be known, then set up the device and the process group.

        Raises:
            ConfigConflictError: The config and the Trainer differ.
            ValueError: A parallel size doesn't fit ranks, experts, heads or widths, or there is no layer to share.
            RuntimeError: The accelerator isn't supported, or isn't the one that DeepSpeed was imported for.
            UnsupportedFeatureError: A callback, a hook or a setting of the Trainer can't work with partitioned weights.
            SetupError: The module's layers are shared out in another way, by an earlier run.
        """
        self._check_accelerator()
        refusals.check(self.lightning_module, self.world_size, self.options.stock_semantics)
        self._check_config()
        if self.lightning_module is not None:
            refuse_meta_tensors(self.lightning_module)
        self._check_parallel_layers()
        self._check_router_biases()
        # DeepSpeedStrategy's own method refuses anything but CUDA; its base class sets up the environment for any.
        super(DeepSpeedStrategy, self).setup_environment()

    def setup(self, trainer: Any) -> None:
        """As Lightning's, with buffers kept in fp32, or named, as docs/precision.md says."""
        assert isinstance(self.config, dict)
        stock = self.options.stock_semantics
        with precision.keeping_what_is_fp32(self.precision_plugin, self.config, stock_semantics=stock):
            super().setup(trainer)

    def setup_distributed(self) -> None:
        """Make the process group: NCCL for CUDA, gloo for CPU."""
        theirs = torch.distributed.is_initialized()
        if self.local_rank == 0:
            # FusedAdam and others are built when a fit makes them; nothing would be heard of that wait.
            build_locks.warn_of_abandoned()
        if self.root_device.type == "cuda":
            super().setup_distributed()
        else:
            # The same as Lightning's, less its check of GPU indices, which CPU devices fail.
            cpu_ops.prepare()
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        self._groups_before_fit = group_timeouts.groups()
        # DeepSpeed's own calls, several times a step and rank: nothing that a user could mend.
        warnings.filterwarnings("ignore", message=DEPRECATED_CALLS, category=FutureWarning)
        if not theirs:
            process_exit.leave_process_group_at_exit()

    def teardown(self) -> None:
        """As Lightning's, which moves the module to the CPU and fails on one that was refused for being on meta."""
        module = self.lightning_module
        with ExitStack() as scope:
            if module is not None and meta_tensors(module):
                scope.enter_context(substituted(module, "cpu", lambda: module))
            super().teardown()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """What ``configure_model`` runs in: each module is partitioned as it is built, with a whole model's values."""
        if self.options.stock_semantics:
            with super().model_sharded_context():
                yield
            return
        self._init_config_if_needed()
        assert isinstance(self.config, dict)
        engine_end.forget_what_engines_leave(self.config)
        with sharded_build(self.config, self.remote_device):
            yield

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        from lightning_zero3.engine import build_training_engine
        from lightning_zero3.verify_parallel import verify_parallel

        assert isinstance(self.config, dict)
        refuse_meta_tensors(model)
        target, split, config = self._layers_for(model)
        if target is not None and self.options.router_bias_update_speed is None:
            auxiliary_loss.warn_if_off(target.module, target.path)
        switches = Switches.from_options(self.options)
        if self.options.verify_parallel and engine_end.engine_of(model) is not None:
            rank_zero_warn(
                "verify_parallel: this module's layers are in place already, from an earlier run: nothing is compared."
            )
        elif self.options.verify_parallel:
            verify_parallel(
                target, split, self.config, self.parallel_layout, local_rank=self._device_index, switches=switches
            )
        built = build_training_engine(
            model,
            config=config,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            local_rank=self._device_index,
            switches=switches,
            target=target,
            split=split,
            print_timers=not self._quiet_timers,
            leaf_modules=not self.options.stock_semantics,
        )
        group_timeouts.set_for_new(self._groups_before_fit, self._timeout)
        self._guard_loading(built[0])
        return built

    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        return refusals.the_optimizer(self.lightning_module)

    def _auto_select_batch_size(self) -> int:
        return loaders.micro_batch_size(self.lightning_module)

    def process_dataloader(self, dataloader: object) -> object:
        """Make sure that all ranks have the same number of batches."""
        seeded = super().process_dataloader(dataloader)
        return same_batches.made_sure_of(seeded, self.lightning_module, self._timeout)

    def _restore_zero_state(self, ckpt: Mapping[str, Any], strict: bool) -> None:
        if self.options.stock_semantics:
            super()._restore_zero_state(ckpt, strict)
            return
        assert self.lightning_module is not None
        load_consolidated(self.lightning_module, ckpt["state_dict"], strict)

    def _check_accelerator(self) -> None:
        if not isinstance(self.accelerator, CUDAAccelerator | CPUAccelerator):
            raise RuntimeError(
                f"zero3_fast runs on CUDA GPUs and on CPUs, not with {type(self.accelerator).__name__}. Pass "
                'Trainer(accelerator="cuda") or Trainer(accelerator="cpu").'
            )
        from deepspeed.accelerator import get_accelerator

        seen, wanted = get_accelerator().device_name(), self.root_device.type
        if seen.split(":")[0] != wanted:
            raise RuntimeError(
                f"The Trainer runs on {wanted}, but DeepSpeed was imported for {seen}, which it decides once per "
                f"process. Set the environment variable DS_ACCELERATOR={wanted} before Python starts."
            )

    def _check_config(self) -> None:
        module = self.lightning_module
        assert isinstance(self.config, dict)
        if module is None or self._config_initialized:
            return
        precision.require_deepspeed_precision(self.precision_plugin)
        ds_config.check_against_trainer(
            self.config,
            trainer=module.trainer,
            world_size=self.world_size,
            precision=self.precision_plugin.precision,
            micro_batch_size=self._auto_select_batch_size() if "train_batch_size" in self.config else None,
        )
        ds_config.settle_trainer_values(self.config)

    def _check_parallel_layers(self) -> None:
        assert isinstance(self.config, dict)
        experts = ds_config.expert_parallel_section(self.config)
        tensors = ds_config.tensor_parallel_section(self.config)
        module = self.lightning_module
        if self.options.verify_parallel and (module is None or module.trainer.state.fn == TrainerFn.FITTING):
            parallel_layers.refuse_nothing_to_verify(self.config)
        if module is None or self._check_layers_of_an_earlier_engine(module) or (experts is None and tensors is None):
            return
        topology = parallel_layers.topology_of(self.config, self.world_size)
        if expert_parallel.holds_a_model(module) or not is_overridden("configure_model", module, LightningModule):
            parallel_layers.targets(module, self.config, self.world_size)
        elif experts is not None:
            # The model is built later, in the process group; its config often hangs on the module already.
            expert_parallel.check_declared_configs(module, experts.get("preset_model"), topology)


def _refuse_fixed_arguments(arguments: dict[str, Any]) -> None:
    """Take out ``stage`` and ``zero_optimization`` where they say what is true anyway."""
    for name, fixed in (("stage", 3), ("zero_optimization", True)):
        if arguments.pop(name, fixed) != fixed:
            raise ConfigConflictError(f"zero3_fast always has {name}={fixed}: leave {name} out.")


def _refuse_unknown_arguments(arguments: Mapping[str, Any]) -> None:
    known = [*(field.name for field in dataclasses.fields(Zero3Options)), *_deepspeed_strategy_defaults()]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"Zero3FastStrategy has no argument {name!r}.{hint}")


def _not_at_default(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that differ from ``DeepSpeedStrategy``'s defaults; LightningCLI passes all defaults explicitly."""
    defaults = _deepspeed_strategy_defaults()
    return {name: value for name, value in arguments.items() if value != defaults.get(name, inspect.Parameter.empty)}


def _deepspeed_strategy_defaults() -> dict[str, Any]:
    parameters = inspect.signature(DeepSpeedStrategy.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}
