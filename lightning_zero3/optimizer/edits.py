# SPDX-License-Identifier: Apache-2.0
"""What a user writes into gathered weights reaches the masters, so that the next step keeps it.

Upstream symbols: ``GatheredParameters`` and the methods ``all_gather`` and ``partition`` that
``Init._convert_to_deepspeed_param`` sets on each parameter (0.19.7, 0.19.8). On leaving
``GatheredParameters(..., modifier_rank=0)`` the weights' partitions are written and nothing else; where masters are
separate the next step overwrites the edit from them. Without ``modifier_rank`` the edit is thrown away. Under torch
autocast a forward may have gathered a parameter in 16 bits, and those rounded values would be written back: where
weights and masters are one storage, into the masters.

There is no global patch: ``all_gather`` and ``partition`` of this engine's parameters are wrapped, on the parameters
themselves, until ``destroy``. Expires when upstream's ``partition(has_been_updated=True)`` updates masters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.listing import first_few
from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches

# The depth of GatheredParameters contexts that hold a parameter: an attribute that upstream sets on it.
CONTEXT_DEPTH = "_ds_z3_gathered_param_context_depth"


class LostEditError(RuntimeError):
    """Weights were changed in a way that no rank could keep."""


class KeepEdits(OptimizerPart):
    """Mixin over a Stage-3 optimizer: carries edits of gathered weights over to the masters."""

    switches: Switches
    module: torch.nn.Module
    param_names: dict[torch.nn.Parameter, str]
    grad_position: dict[Any, Any]
    # ds_ids of parameters that a context has gathered: a sum over their bits, and the exception in flight then.
    _at_entry: dict[int, tuple[torch.Tensor, BaseException | None]]
    _gathers_itself = False

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        self._at_entry = {}
        if self.switches.keep_edits:
            for parameter in self.module.parameters():
                _wrap(parameter, "all_gather", _gather_exactly)
                _wrap(parameter, "partition", _partition_with_edits)

    def destroy(self) -> None:
        """As upstream's; the parameters get their own methods back."""
        for parameter in self.module.parameters():
            # A later engine on the same parameters has put its own wrappers there.
            if getattr(parameter, "_z3_optimizer", None) is self:
                _unwrap(parameter, "all_gather")
                _unwrap(parameter, "partition")
        super().destroy()

    def _post_step(self, *arguments: Any) -> None:
        with self._upstreams_own_gather():
            super()._post_step(*arguments)

    def checkpoint_event_epilogue(self) -> None:
        """As upstream's."""
        with self._upstreams_own_gather():
            super().checkpoint_event_epilogue()

    @contextmanager
    def _upstreams_own_gather(self) -> Iterator[None]:
        """Persistent parameters are gathered in here, by upstream or by a part of ours, and no context is entered."""
        self._gathers_itself = True
        try:
            yield
        finally:
            self._gathers_itself = False

    def is_optimized(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter of the module has a master here. One that was frozen at the start has none."""
        return self.get_param_id(parameter) in self.grad_position

    @torch.no_grad()
    def take_over_edit(self, parameter: Any) -> None:
        """Write into a master those elements whose weight is no longer the rounded master.

        With fp32 masters of 16-bit weights everything that wasn't edited keeps its 32 bits.

        Args:
            parameter: A partitioned parameter whose ``ds_tensor`` (1-d, in the weights' dtype) is this rank's edited
                partition.
        """
        if not self.is_optimized(parameter):
            return
        if parameter.ds_tensor.numel() != parameter.partition_numel():
            rank_zero_warn(
                "Where weights live on NVMe, the next optimizer step overwrites an edit of gathered weights. Use "
                "deepspeed.utils.safe_set_full_fp32_param instead."
            )
            return
        real = self.real_elements(parameter)
        with self.master_of(parameter) as whole_master:
            weights, master = parameter.ds_tensor[:real], whole_master[:real]
            if weights.data_ptr() == master.data_ptr():
                return  # they are one storage
            edited = weights.to(master.device)
            master.copy_(torch.where(_differs(edited, master.to(edited.dtype)), edited.to(master.dtype), master))

    def remember_gathered(self, parameter: Any) -> None:
        """Take a parameter's gathered values for the ones that its partitions hold."""
        self._at_entry[parameter.ds_id] = _sum_of_bits(parameter.data), sys.exc_info()[1]

    def real_elements(self, parameter: Any) -> int:
        """Number of elements of this rank's partition that aren't padding."""
        size = int(parameter.partition_numel())
        start = size * int(self._get_param_partition_rank(parameter))
        return max(0, min(size, int(parameter.ds_numel) - start))

    @contextmanager
    def master_of(self, parameter: Any, optim_state_key: str | None = None) -> Iterator[torch.Tensor]:
        """This rank's part of a parameter's master or moment, to be written to; swapped in and out where on NVMe."""
        optimizer: Any = self
        master, sub_group = optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=optim_state_key
        )
        yield master.data
        if optimizer._swappable_optimizer_subgroup(sub_group):
            optimizer._optimizer_states_and_gradient_swap_out(sub_group)

    def _would_lose(self, parameter: Any) -> bool:
        """Whether the gathered weights, about to be thrown away, differ from what the partition keeps."""
        gathered, kept = parameter.data, parameter.ds_tensor
        real = self.real_elements(parameter)
        whole = gathered.numel() == parameter.ds_numel and kept.numel() == parameter.partition_numel()
        if not whole or hasattr(kept, "ds_quant_scale"):
            return False
        before, exception = self._at_entry.get(parameter.ds_id, (None, None))
        # The edit of a context that is left by an exception isn't worth a second one.
        if sys.exc_info()[1] not in (None, exception):
            return False
        if before is not None and not torch.equal(before, _sum_of_bits(gathered)):
            return True  # other ranks' parts count too
        start = kept.numel() * self._get_param_partition_rank(parameter)
        return bool(_differs(gathered.reshape(-1)[start : start + real], kept[:real].to(gathered.device)).any())


def _gather_exactly(original: Any, parameters: list[Any], *args: Any, **kwargs: Any) -> Any:
    """``all_gather``, after which every parameter holds what the partitions hold.

    Copies that lie around from a forward may be rounded (autocast gathers in 16 bits), or older than the partitions.
    Those that a forward is using stay: upstream doesn't let a context that holds one end.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    owned = [(owner, p) for owner, p in _owned(parameters) if not owner._gathers_itself]
    for _, parameter in owned:
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_active_sub_modules:
            parameter.partition()
    result = original(parameters, *args, **kwargs)
    for owner, parameter in owned:
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            owner.remember_gathered(parameter)
    return result


def _partition_with_edits(
    original: Any, parameters: list[Any], hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
) -> Any:
    """``partition``, which carries edits over to masters.

    Raises:
        LostEditError: Weights were changed inside ``GatheredParameters`` without ``modifier_rank``.
    """
    # Releases around a forward or a step, by far the most calls, end here.
    if not has_been_updated and not any(getattr(p, CONTEXT_DEPTH, 0) for p in parameters):
        original(parameters, hierarchy, has_been_updated, free_data)
    else:
        _keep_edits(original, parameters, hierarchy, has_been_updated, free_data)


@torch.no_grad()
def _keep_edits(original: Any, parameters: list[Any], hierarchy: int, has_been_updated: bool, free_data: bool) -> None:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    available = [(owner, p) for owner, p in _owned(parameters) if p.ds_status == ZeroParamStatus.AVAILABLE]
    if has_been_updated:
        original(parameters, hierarchy, has_been_updated, free_data)
        for owner, parameter in available:
            owner.take_over_edit(parameter)
            owner._at_entry.pop(parameter.ds_id, None)
        return
    available = [(owner, p) for owner, p in available if free_data and getattr(p, CONTEXT_DEPTH, 0) > 0]
    alone = [(owner, p) for owner, p in available if owner._get_param_partition_world_size(p) == 1]
    for owner, parameter in alone:
        # A single rank's values are everybody's; often they are in the partition already.
        parameter.ds_tensor[: owner.real_elements(parameter)].copy_(parameter.data.reshape(-1))
    several = [(owner, p) for owner, p in available if owner._get_param_partition_world_size(p) > 1]
    lost = [p for owner, p in several if owner._would_lose(p)]
    original(parameters, hierarchy, has_been_updated, free_data)
    for owner, parameter in available:
        owner._at_entry.pop(parameter.ds_id, None)
    for owner, parameter in alone:
        owner.take_over_edit(parameter)
    if lost:
        raise LostEditError(_lost_edits(available[0][0], lost))


def _lost_edits(owner: KeepEdits, parameters: list[Any]) -> str:
    names = [owner.param_names.get(p, f"a parameter of shape {tuple(p.ds_shape)}") for p in parameters]
    return (
        f"Weights were changed inside GatheredParameters and can't be kept: {first_few(names, 3)}. Pass "
        "modifier_rank=0: rank 0's values are then written to every rank's partition. Run no forward inside the "
        "context, since it releases the weights."
    )


def _owned(parameters: list[Any]) -> list[tuple[KeepEdits, Any]]:
    """The parameters with their optimizers; a list may mix engines, and hold parameters of none."""
    pairs = [(getattr(parameter, "_z3_optimizer", None), parameter) for parameter in parameters]
    return [(owner, p) for owner, p in pairs if isinstance(owner, KeepEdits) and owner.switches.keep_edits]


def _sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    """A number that nearly every edit changes, on the values' device."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(bits).sum(dtype=torch.int64)


def _differs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; a NaN is equal to a NaN."""
    return (left != right) & ~(left.isnan() & right.isnan())


def _wrap(parameter: Any, name: str, wrapper: Callable[..., Any]) -> None:
    _unwrap(parameter, name)
    original = getattr(parameter, name)

    def method(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, [parameter] if param_list is None else list(param_list), *args, **kwargs)

    method.upstream = original  # type: ignore[attr-defined]
    setattr(parameter, name, method)


def _unwrap(parameter: Any, name: str) -> None:
    method = getattr(parameter, name)
    setattr(parameter, name, getattr(method, "upstream", method))
