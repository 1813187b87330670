# SPDX-License-Identifier: Apache-2.0
"""Moving an optimizer's states to the host and back, exactly.

Where weights and masters share one storage they move together, whichever of the two is asked for: one copy of
``lp_param_buffer``, then every tensor that views it is bound to the copy. The tensor objects stay the same, so the
alias, ``ds_tensor`` and the keys of the optimizer's state survive, and after a reload the saving is still there.

Upstream symbols: ``DeepSpeedZeroOptimizer_Stage3.offload_states``, ``reload_states`` and the names that ``destroy``
unpins (0.19.7, 0.19.8). Upstream moves masters and weights apart, which is right for two copies and corrupts one; it
also moves masters and moments of FusedAdam only, restores a stale buffer when pinning is switched off between two
offloads, and walks the module's order where the buffer has the sub-groups'. Gradients and the reduction bucket, which
share nothing, are left to it. Expires when upstream moves shared storage exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from lightning_zero3.optimizer.part import OptimizerPart
from lightning_zero3.optimizer.switches import Switches


class MoveStates(OptimizerPart):
    """Mixin over a Stage-3 optimizer, above upstream's methods: moves weights, masters and moments."""

    switches: Switches
    # Each parameter's ds_tensor, by sub-group.
    fp16_partitioned_groups: list[list[Any]]
    fp16_partitioned_groups_flat: list[torch.Tensor | None]
    fp16_partitioned_groups_flat_numel: list[int]
    fp32_partitioned_groups_flat: list[torch.Tensor]
    lp_param_buffer: torch.Tensor
    optimizer: torch.optim.Optimizer
    offloaded_states: set[Any]
    # Masters of their own and moments that are on the host, by state, with the device that each came from.
    _away: dict[Any, list[tuple[torch.Tensor, torch.device]]]

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        self._away = {}

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = None,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host; with an alias, weights and masters together.

        Args:
            include: ``OffloadStateTypeEnum`` members; None means all of them. Where anything is aliased, either of
                ``hp_params`` and ``lp_params`` moves both.
            device: ``OffloadDeviceEnum.cpu``, the only one that upstream has.
            pin_memory: Whether the host memory is page-locked.
            non_blocking: Whether copies may still run on return. The device memory is let go of all the same.
        """
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        device = OffloadDeviceEnum.cpu if device is None else device
        if not self._moves_itself():
            super().offload_states(include, device, pin_memory, non_blocking)
            return
        wanted = set(State if include is None else include)
        pair = {State.hp_params, State.lp_params}
        if wanted & pair and self.aliased_sub_groups():
            wanted |= pair
        due = wanted - self.offloaded_states
        if State.lp_params in due:
            self.empty_partition_cache()
            self._bring_strays_home()
            self._bind(self._host_copy_of_weights(device.value, pin_memory, non_blocking))
        if State.hp_params in due:
            self._send_away(State.hp_params, self._separate_masters(), device.value, pin_memory, non_blocking)
        if State.optim_states in due:
            self._send_away(State.optim_states, self._moments(), device.value, pin_memory, non_blocking)
        mine = pair | {State.optim_states}
        self.offloaded_states |= due & mine
        if not pin_memory and State.lp_grads in due:
            # Upstream's reload prefers an earlier offload's pinned buffer to what this one has moved.
            self._drop_pinned("lp_grad_partitions_flat_pin_buffers")
        super().offload_states([s for s in State if s in due - mine], device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move everything back to the device; what was aliased is aliased again.

        Args:
            non_blocking: Whether copies may overlap; they are finished on return.
        """
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # Copies may run until upstream's method synchronises; what they read must live as long.
        on_the_host: list[torch.Tensor] = []
        if self._moves_itself():
            if State.lp_params in self.offloaded_states:
                host = self.lp_param_buffer.data
                on_the_host.append(host)
                self._bind(_copy(host, get_accelerator().current_device_name(), non_blocking))
            for tensor, home in (pair for pairs in self._away.values() for pair in pairs):
                on_the_host.append(tensor.data)
                tensor.data = _copy(tensor.data, home, non_blocking)
            self._away = {}
            self.offloaded_states -= {State.lp_params, State.hp_params, State.optim_states}
        super().reload_states(non_blocking)
        del on_the_host

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's.

        Raises:
            RuntimeError: States are on the host; new ones would be made there and never come back.
        """
        if self.offloaded_states and self._moves_itself():
            away = ", ".join(sorted(state.value for state in self.offloaded_states))
            raise RuntimeError(f"{away} are offloaded: call reload_states() before loading a checkpoint.")
        return super().load_state_dict(*args, **kwargs)

    def _bring_strays_home(self) -> None:
        """Copy masters back into the buffer that something has bound to other storage.

        An optimizer may say ``p.data = p.data - lr * p.grad``. Upstream then lets the weights follow the master, and
        leaves the buffer behind.
        """
        buffer, offset, strayed = self.lp_param_buffer, 0, False
        for flat, numel in zip(self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups_flat_numel, strict=True):
            assert flat is not None
            home = buffer.data.narrow(0, offset, int(numel))
            if flat.data_ptr() != home.data_ptr():
                home.copy_(flat.data)
                strayed = True
            offset += int(numel)
        if strayed:
            self._bind(buffer.data)

    def _moves_itself(self) -> bool:
        return self.switches.move_exactly or bool(self.aliased_sub_groups())

    def _separate_masters(self) -> list[torch.Tensor]:
        pairs = zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, strict=True)
        return [master for weights, master in pairs if master is not weights]

    def _moments(self) -> list[torch.Tensor]:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        # Step counters are numbers without a dimension, and some optimizers insist on where theirs is. A moment of one
        # element moves: it may lie in one storage with its neighbours', and would keep all of it on the device.
        return [value for value in states if torch.is_tensor(value) and value.ndim > 0]

    def _host_copy_of_weights(self, device: str, pin_memory: bool, non_blocking: bool) -> torch.Tensor:
        # The name under which upstream keeps such a buffer for the next time, and unpins it in destroy().
        name = "lp_param_contiguous_pin_buffer"
        if not pin_memory:
            self._drop_pinned(name)
            return _copy(self.lp_param_buffer.data, device, non_blocking)
        if not hasattr(self, name):
            setattr(self, name, _pinned_like(self.lp_param_buffer.data, device))
        buffer: torch.Tensor = getattr(self, name)
        return buffer.copy_(self.lp_param_buffer.data, non_blocking=non_blocking)

    def _bind(self, buffer: torch.Tensor) -> None:
        """Point the buffer, each sub-group's flat partition (its master too) and each ``ds_tensor`` at ``buffer``."""
        self.lp_param_buffer.data = buffer
        offset = 0
        for flat, numel, partitions in zip(
            self.fp16_partitioned_groups_flat,
            self.fp16_partitioned_groups_flat_numel,
            self.fp16_partitioned_groups,
            strict=True,
        ):
            assert flat is not None  # only NVMe has sub-groups without one, and there nothing is aliased
            flat.data = buffer.narrow(0, offset, int(numel))
            for partition in partitions:
                partition.data = buffer.narrow(0, offset, partition.ds_numel)
                offset += partition.ds_numel

    def _send_away(
        self, state: Any, tensors: Iterable[torch.Tensor], device: str, pin_memory: bool, non_blocking: bool
    ) -> None:
        self._away[state] = [(tensor, tensor.device) for tensor in tensors]
        for tensor, _ in self._away[state]:
            if pin_memory:
                host = _pinned_like(tensor.data, device)
                host.copy_(tensor.data, non_blocking=non_blocking)
                tensor.data = host
            else:
                tensor.data = _copy(tensor.data, device, non_blocking)

    def _drop_pinned(self, name: str) -> None:
        from deepspeed.accelerator import get_accelerator

        if hasattr(self, name):
            get_accelerator().unpin_memory(getattr(self, name))
            delattr(self, name)


def _copy(source: torch.Tensor, device: Any, non_blocking: bool) -> torch.Tensor:
    """A copy in a storage of its own, also where source and target device are the same."""
    return torch.empty_like(source, device=device).copy_(source, non_blocking=non_blocking)


def _pinned_like(source: torch.Tensor, device: Any) -> torch.Tensor:
    from deepspeed.accelerator import get_accelerator

    pinned: torch.Tensor = get_accelerator().pin_memory(torch.empty_like(source, device=device))
    return pinned
