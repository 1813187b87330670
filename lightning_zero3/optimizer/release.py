# SPDX-License-Identifier: Apache-2.0
"""Parameters are released once before the step, and only those that hold something.

Upstream symbol: ``DeepSpeedZeroOptimizer_Stage3._partition_all_parameters``, which goes to
``DeepSpeedZeRoOffload.partition_all_parameters`` and ``PartitionedParameterCoordinator.release_and_reset_all``
(0.19.7, 0.19.8): three walks over all modules, each collecting all parameters anew, although nearly all of them were
released by the end of backward. Expires when upstream walks once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.optimizer.upstream_path import has_secondary_partitions, reason_for_upstreams_step

# Private to upstream's coordinator. Absent names leave the release to upstream.
_IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"
_AVAILABLE_COUNT = "_PartitionedParameterCoordinator__n_available_params"


class ParameterList:
    """A module's parameters as upstream's ``iter_params`` lists them, listed anew only when the module has changed.

    A change is found by looking at what every module registers, so a parameter or submodule that is added, removed or
    replaced counts however that was done; modules that only a forward knows (Transformers slices its layers into
    throw-away lists) don't.

    Args:
        module: The engine's module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._registered: list[Any] = []
        self._registries: list[Any] = []
        self._parameters: list[Any] = []

    def current(self) -> list[Any]:
        """All parameters, external ones included."""
        # dict's own methods: DeepSpeed's registries fetch parameters when they are indexed. Identities are compared, so
        # that no parameter's memory is touched.
        registered = list(itertools.chain.from_iterable(map(dict.values, self._registries)))
        same_number = len(registered) == len(self._registered) > 0
        if not (same_number and all(map(operator.is_, registered, self._registered))):
            self._list_anew()
        return self._parameters

    def _list_anew(self) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params

        self._parameters = list(iter_params(self._module, recurse=True))
        modules = list(self._module.modules())
        registries = [registry for module in modules for registry in (module._parameters, module._modules)]
        external = getattr(self._module, "_external_params", None)
        self._registries = registries if external is None else [*registries, external]
        self._registered = list(itertools.chain.from_iterable(map(dict.values, self._registries)))


class SkipRedundantRelease(OptimizerPart):
    """Mixin over a Stage-3 optimizer: one look at each parameter, and work only for those that are gathered."""

    switches: Switches
    module: Any
    # Parameters looked at by the last release; read by tests and benchmarks.
    release_visits = 0
    _step_begins = False
    # Persistent parameters that the last release left as they are.
    _left_in_place: Sequence[Any] = ()
    _parameter_list: ParameterList | None = None

    def _pre_step(self) -> None:
        super()._pre_step()
        self._step_begins = True

    def _partition_all_parameters(self) -> None:
        # Checkpoints call this too, and then every parameter has to be released.
        step_begins, self._step_begins = self._step_begins, False
        if not (step_begins and self.switches.skip_redundant_release and self._release_gathered()):
            super()._partition_all_parameters()

    def invalidate_secondary_tensor(self) -> None:
        """As upstream's, which visits every parameter: only where there are secondary partitions (hpZ)."""
        if not self.switches.skip_redundant_release or has_secondary_partitions(self):
            super().invalidate_secondary_tensor()

    def _post_step(self, *arguments: Any) -> None:
        # An optimizer that gives masters new storage has taken the partitions along, and not the parameters.
        for parameter in _not_their_partitions(self._left_in_place):
            self._free(parameter)
        self._left_in_place = ()
        super()._post_step(*arguments)

    def _overflow_clean_up(self, *arguments: Any) -> None:
        # A step that is skipped gathers nothing, so upstream leaves persistent parameters released.
        for parameter in self._left_in_place:
            self._free(parameter)
        self._left_in_place = ()
        super()._overflow_clean_up(*arguments)

    def _release_gathered(self) -> bool:
        """Release what is gathered, in one pass; False where upstream has to do the rest."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        coordinator = self._get_param_coordinator()
        if (
            reason_for_upstreams_step(self) is not None
            or getattr(coordinator, _IN_FLIGHT, True)  # a gather that is under way has to be waited for
            or not hasattr(coordinator, _AVAILABLE_COUNT)
        ):
            return False
        if self._parameter_list is None:
            self._parameter_list = ParameterList(self.module)
        parameters = self._parameter_list.current()
        released, gathered = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
        persistent: list[Any] = []
        freed, complete = 0, True
        for parameter in parameters:
            if parameter.ds_active_sub_modules:
                parameter.ds_active_sub_modules.clear()
            if parameter.ds_status is released:
                continue
            if parameter.ds_status is not gathered or parameter.ds_tensor.final_location is not None:
                complete = False
                continue
            freed += parameter.ds_numel
            if parameter.ds_persist:
                persistent.append(parameter)
            else:
                self._free(parameter)
        self.release_visits = len(parameters)
        # Upstream counts a persistent parameter out at each release and never in again; prefetching follows that count.
        setattr(coordinator, _AVAILABLE_COUNT, getattr(coordinator, _AVAILABLE_COUNT) - freed)
        # On one rank a persistent parameter is a view of its own partition: there is nothing to free, and the gather
        # after the step would bind the same view again.
        away = _not_their_partitions(persistent) if complete else persistent
        for parameter in away:
            self._free(parameter)
        if len(away) < len(persistent):
            gone = set(map(id, away))
            self._left_in_place = [parameter for parameter in persistent if id(parameter) not in gone]
        else:
            self._left_in_place = ()
        return complete

    @staticmethod
    def _free(parameter: Any) -> None:
        """What upstream's ``free_param`` does, without an NVTX range for each."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if not get_accelerator().is_synchronized_device():
            parameter.data.record_stream(get_accelerator().current_stream())
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _not_their_partitions(parameters: Sequence[Any]) -> Sequence[Any]:
    """Those of the gathered parameters that hold memory of their own: all, if there is more than one rank."""
    partitions = [parameter.ds_tensor for parameter in parameters]
    same_place = map(operator.eq, map(torch.Tensor.data_ptr, parameters), map(torch.Tensor.data_ptr, partitions))
    whole = map(operator.eq, map(torch.Tensor.numel, partitions), map(operator.attrgetter("ds_numel"), parameters))
    theirs = list(map(operator.and_, same_place, whole))
    return [p for p, own in zip(parameters, theirs, strict=True) if not own] if not all(theirs) else ()
