# SPDX-License-Identifier: Apache-2.0
"""What the strategies of Trainer and of Fabric both do about process groups, layers and engines."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3 import build_locks, cpu_ops, ds_config, engine_end, group_timeouts, process_exit
from lightning_zero3.checkpoints import layout_record, loading
from lightning_zero3.config import SetupError, Zero3Options
from lightning_zero3.moe import auxiliary_loss, expert_parallel, parallel_layers, tensor_parallel
from lightning_zero3.moe.build import refuse_meta_tensors
from lightning_zero3.moe.sharded_build import sharded_build
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.topology import Topology

# torch 2.13 on the collectives that DeepSpeed 0.19.8 uses. Expires when DeepSpeed calls their new names.
DEPRECATED_CALLS = r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated"
_ACCELERATORS = {"CUDAAccelerator", "CPUAccelerator"}
_SECTIONS = ("expert_parallel", "tensor_parallel")


class EngineSetup:
    """Mixin over a ``DeepSpeedStrategy`` of Lightning's, the Trainer's or Fabric's."""

    # Who takes accelerator=, precision= and so on from the user.
    caller: ClassVar[str] = "Trainer"
    options: Zero3Options
    config: Any
    # Lightning's: the engine once there is one.
    model: Any
    accelerator: Any
    root_device: torch.device
    remote_device: str | None
    world_size: int
    global_rank: int
    local_rank: int
    _timeout: timedelta | None
    _quiet_timers = False
    _groups_before: tuple[Any, ...] = ()

    @property
    def parallel_layout(self) -> Topology:
        """Which ranks share experts and layers."""
        return parallel_layers.topology_of(self.config, self.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """What Lightning's samplers are made with, and a user's own may be: which shard of how many is this rank's.

        With ``stock_semantics`` every rank has its own, as in stock; under tensor parallelism that is an error then.
        """
        if self.options.stock_semantics:
            of_each_rank: dict[str, int] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return of_each_rank
        layout = self.parallel_layout
        return {"num_replicas": layout.data_parallel_size, "rank": layout.data_parallel_rank(self.global_rank)}

    def enable_step_timers(self) -> None:
        """Have DeepSpeed time forward, backward and step of each micro-step, without the lines it would print.

        Called by :class:`lightning_zero3.Zero3Monitor` before the engine is built. A ``wall_clock_breakdown`` in the
        user's own config keeps its lines.
        """
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
            RuntimeError: There is no engine yet: call it during or after fit (Fabric: after setup).
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
            RuntimeError: There is no engine yet: call it during or after fit (Fabric: after setup).
        """
        self._engine().reload_states(non_blocking=non_blocking)

    def _engine(self) -> Any:
        if not hasattr(self.model, "offload_states") or not engine_end.has_optimizer(self.model):
            raise RuntimeError(
                "There is no DeepSpeed engine with an optimizer here, so no states to move: call this during or after "
                "fit (with Fabric: after setup), and before another run takes the module over."
            )
        return self.model

    def _check_accelerator(self) -> None:
        """Before anything is set up.

        Raises:
            RuntimeError: The accelerator isn't supported, or isn't the one that DeepSpeed was imported for.
        """
        if _ACCELERATORS.isdisjoint(kind.__name__ for kind in type(self.accelerator).__mro__):
            raise RuntimeError(
                f"zero3_fast runs on CUDA GPUs and on CPUs, not with {type(self.accelerator).__name__}. Pass "
                f'{self.caller}(accelerator="cuda") or {self.caller}(accelerator="cpu").'
            )
        from deepspeed.accelerator import get_accelerator

        seen, wanted = get_accelerator().device_name(), self.root_device.type
        if seen.split(":")[0] != wanted:
            raise RuntimeError(
                f"{'Fabric' if self.caller == 'Fabric' else 'The Trainer'} runs on {wanted}, but DeepSpeed was imported"
                f" for {seen}, which it decides once per process. Set the environment variable "
                f"DS_ACCELERATOR={wanted} before Python starts."
            )

    @contextmanager
    def _making_process_group(self) -> Iterator[None]:
        """What is seen to before and after Lightning makes the process group."""
        theirs = torch.distributed.is_initialized()
        if self.local_rank == 0:
            # FusedAdam and others are built when an engine makes them; nothing would be heard of that wait.
            build_locks.warn_of_abandoned()
        if self.root_device.type == "cpu":
            cpu_ops.prepare()
        yield
        self._groups_before = tuple(group_timeouts.groups())
        # DeepSpeed's own calls, several times a step and rank: nothing that a user could mend.
        warnings.filterwarnings("ignore", message=DEPRECATED_CALLS, category=FutureWarning)
        if not theirs:
            process_exit.leave_process_group_at_exit()

    def _sharded_build(self) -> AbstractContextManager[None]:
        """What a model is built in so that each module is partitioned at once, with a whole model's values."""
        engine_end.forget_what_engines_leave(self.config)
        return sharded_build(self.config, self.remote_device)

    @property
    def _device_index(self) -> int:
        """The GPU's index; a CPU has none, and DeepSpeed's engine wants a number all the same."""
        return self.local_rank if self.root_device.index is None else self.root_device.index

    def _layers_for(self, model: nn.Module) -> tuple[Any, Any, dict[str, Any]]:
        """The models that AutoEP and AutoTP work on, or have worked on, and the config with what was found out."""
        before = engine_end.engine_of(model)
        if before is None or (before.experts is None and before.split is None):
            return parallel_layers.targets(model, self.config, self.world_size)
        found = {name: before.config[name] for name in _SECTIONS if name in before.config}
        return before.experts, before.split, {**self.config, **found}

    def _check_layers_of_an_earlier_engine(self, module: nn.Module) -> bool:
        """Whether layers are shared out already; they must be as this run asks.

        Raises:
            SetupError: They aren't, or it isn't known how they are.
        """
        before = engine_end.engine_of(module)
        replaced = expert_parallel.already_replaced(module) or tensor_parallel.already_split(module)
        if not replaced:
            return False
        asked = _sizes(self.config)
        made = None if before is None else _sizes(before.config)
        if asked != made:
            shown = "an engine that isn't zero3_fast's" if made is None else f"an earlier run with {_said(made)}"
            raise SetupError(
                f"{type(module).__name__}'s layers are shared out by {shown}, and this {self.caller} has "
                f"{_said(asked)}. Pass the same sizes, or build the module anew and load a checkpoint."
            )
        return True

    def _training_engine(self, model: nn.Module, optimizer: Any, lr_scheduler: Any) -> tuple[Any, Any]:
        """Build the engine that trains a module, after ``verify_parallel`` if asked.

        Args:
            model: The root module.
            optimizer: The user's optimizer, or None where the config names one.
            lr_scheduler: The user's scheduler, or None.

        Returns:
            The engine and the optimizer that it built.
        """
        from lightning_zero3.engine import build_training_engine
        from lightning_zero3.verify_parallel import verify_parallel

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
        group_timeouts.set_for_new(list(self._groups_before), self._timeout)
        self._guard_loading(built[0])
        layout_record.keep_in_checkpoints(built[0], self.parallel_layout)
        return built

    def _evaluating_engine(self, model: nn.Module) -> Any:
        """The module's own engine where it computes what is asked for, else a new one without an optimizer.

        Args:
            model: The root module.
        """
        from lightning_zero3.engine import build_inference_engine

        experts, split, config = self._layers_for(model)
        config = ds_config.inference_config(config)
        before = engine_end.engine_of(model)
        if before is not None and not engine_end.has_ended(before.engine) and before.config == config:
            # Lightning's teardown has moved buffers and what was gathered to the CPU.
            model.to(self.root_device)
            return before.engine
        engine = build_inference_engine(
            model, config=config, local_rank=self._device_index, target=experts, split=split
        )
        self._guard_loading(engine)
        return engine

    def _guard_loading(self, engine: Any) -> None:
        any_layout = self.options.resume_layout is not None
        loading.guard(engine, self.parallel_layout, trust=self.options.trust_checkpoint, any_layout=any_layout)


def _sizes(config: Any) -> tuple[int | None, int]:
    experts, tensors = ds_config.expert_parallel_section(config), ds_config.tensor_parallel_section(config)
    return (
        None if experts is None else experts.get("autoep_size", 1),
        1 if tensors is None else tensors.get("autotp_size", 1),
    )


def _said(sizes: tuple[int | None, int]) -> str:
    return f"expert_parallel_size={sizes[0]} and tensor_parallel_size={sizes[1]}"
