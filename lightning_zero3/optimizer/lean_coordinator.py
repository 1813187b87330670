# SPDX-License-Identifier: Apache-2.0
"""Fetch and release around modules, without what has no effect. Importing this module imports DeepSpeed.

Upstream symbols: ``PartitionedParameterCoordinator.fetch_sub_module``, ``release_sub_module`` and what they call, the
attributes named below, and ``partition_parameters.free_param`` (0.19.7, 0.19.8). In most calls there is nothing to
gather, nothing to prefetch and nothing to wait for, or nothing to release, and what upstream then does is
bookkeeping: a module has been passed, and which parameters it uses. That is done here (:meth:`LeanCoordinator.passes`,
:meth:`LeanCoordinator.lets_go`); all else goes through upstream's own functions. Detected by
``capabilities.LEAN_HOOKS``; tests compare gathers, steps and what is live after each call with upstream's. Expires
when upstream returns early.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator

from lightning_zero3.optimizer.edits import CONTEXT_DEPTH
from lightning_zero3.optimizer.rebound import is_leaf, own_parameters, rebound

_Upstream = partitioned_param_coordinator.PartitionedParameterCoordinator
_AVAILABLE = partition_parameters.ZeroParamStatus.AVAILABLE
_COMPLETE = partitioned_param_coordinator.ZeRoTraceMode.COMPLETE
_free = rebound(partition_parameters.free_param)

_PREFIX = "_PartitionedParameterCoordinator__"
_ACTIVE, _MODE, _STEP = f"{_PREFIX}active_backward_submodules", f"{_PREFIX}trace_mode", f"{_PREFIX}step_id"
_ORDER, _QUEUE = f"{_PREFIX}submodule_order", f"{_PREFIX}param_queue"
_RECENT, _IN_FLIGHT = f"{_PREFIX}most_recent_step_id_param_fetched_for", f"{_PREFIX}inflight_param_registry"
_GATHERED, _AT_MOST, _PREFETCHED = (
    f"{_PREFIX}n_available_params",
    f"{_PREFIX}max_n_available_params",
    f"{_PREFIX}prefetch_bucket_sz",
)
_RELEASABLE = f"{_PREFIX}params_to_release"
# Attributes that are read or written here.
STATE = (_ACTIVE, _MODE, _STEP, _ORDER, _QUEUE, _RECENT, _IN_FLIGHT, _GATHERED, _AT_MOST, _PREFETCHED)


class LeanCoordinator(partitioned_param_coordinator.PartitionedParameterCoordinator):  # type: ignore[misc]
    """Another view of an engine's coordinator, with the same state and leaner methods.

    Args:
        coordinator: Upstream's. It stays what it is, for whoever else calls it.
    """

    fetch_sub_module = rebound(_Upstream.fetch_sub_module)
    _fetch_sub_module_impl = rebound(_Upstream._fetch_sub_module_impl)
    release_sub_module = rebound(_Upstream.release_sub_module)
    _PartitionedParameterCoordinator__all_gather_params = rebound(getattr(_Upstream, f"{_PREFIX}all_gather_params"))

    def __init__(self, coordinator: Any) -> None:
        self.__dict__ = coordinator.__dict__
        accelerator = get_accelerator()
        # On a device with streams each wait is followed by events that hold the host back.
        self.__dict__["_zero3_fast_synchronous"] = bool(
            accelerator.resolves_data_dependency() and accelerator.handles_memory_backpressure()
        )

    @property
    def active(self) -> dict[int, Any]:
        """Modules whose backward is under way."""
        found: dict[int, Any] = self.__dict__[_ACTIVE]
        return found

    def passes(self, module: Any, forward: bool) -> bool:
        """Do as ``fetch_sub_module`` does where a module has all that it needs, and nothing can be prefetched.

        Args:
            module: A module whose forward or backward is about to run.
            forward: Which of them.

        Returns:
            False where there is more to do: then nothing was done.
        """
        state = self.__dict__
        step, order, queue = state[_STEP], state[_ORDER], state[_QUEUE]
        if state[_MODE] is not _COMPLETE or step >= len(order) or order[step] is not module or is_leaf(module):
            return False
        if queue and min(state[_AT_MOST] - state[_GATHERED], state[_PREFETCHED]) > 0:
            return False
        if state["_PartitionedParameterCoordinator__prefetch_nvme"] or _debugs():
            return False
        in_flight = state[_IN_FLIGHT].data
        if in_flight and not state["_zero3_fast_synchronous"]:
            return False
        parameters, recent, active = own_parameters(module), state[_RECENT], state[_ACTIVE]
        for parameter in parameters:
            if parameter.ds_status is not _AVAILABLE or recent.get(parameter, -1) < step:
                return False
            # A frozen one that is gathered while a checkpoint is recomputed belongs to the backward under way.
            if forward and active and not parameter.requires_grad:
                return False
        number = module.ds_id
        for parameter in parameters:
            parameter.ds_active_sub_modules.add(number)
            if in_flight:
                # It came with another one that was waited for.
                in_flight.pop(parameter, None)
        if not forward:
            active[number] = module
        state[_STEP] = step + 1
        return True

    def lets_go(self, module: Any, forward: bool) -> bool:
        """Do as ``release_sub_module`` does for a module that is no leaf, by a complete trace.

        Args:
            module: A module whose forward or backward has run.
            forward: Which of them.

        Returns:
            False where there is more to do: then nothing was done.
        """
        state = self.__dict__
        if state[_MODE] is not _COMPLETE or is_leaf(module) or _debugs():
            return False
        if not forward and (not state[_ACTIVE] or module.ds_recompute_parameters):
            return False
        releasable = getattr(self, _RELEASABLE)(module, state[_STEP])
        number = module.ds_id
        if not forward:
            state[_ACTIVE].pop(number, None)
        for parameter in own_parameters(module):
            parameter.ds_active_sub_modules.discard(number)
            if parameter.ds_id in releasable and not parameter.is_external_param:
                self._PartitionedParameterCoordinator__release_param(parameter)
        return True

    def _PartitionedParameterCoordinator__release_param(self, param: Any, free_data: bool = True) -> None:
        if param.ds_status is not _AVAILABLE or param.ds_active_sub_modules:
            return
        partition = param.ds_tensor
        if (
            free_data
            and partition is not None
            and partition.final_location is None
            and param.ds_zero_param_process_group is None
            and not param.__dict__.get(CONTEXT_DEPTH)
            and not _debugs()
        ):
            # All that upstream's `partition` does then, besides lines for a log that nobody reads.
            _free(param)
        else:
            with torch.no_grad():
                param.partition(free_data=free_data)
        self.__dict__[_GATHERED] -= param.ds_numel


def _debugs() -> bool:
    """Whether upstream writes what it does to its log."""
    return bool(partitioned_param_coordinator.logger.isEnabledFor(logging.DEBUG))
