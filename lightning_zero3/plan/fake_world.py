# SPDX-License-Identifier: Apache-2.0
"""One rank of a world that isn't there: no peers, no data, every tensor on the meta device.

DeepSpeed's own set-up runs in it at any size. It is entered in a process of its own
(:mod:`lightning_zero3.plan.child`): a process group is global, and the process that asks for a plan may have one.

Upstream symbols, all of them substituted here and nowhere else, and put back: the functions of ``torch.distributed``
that send data; ``get_accelerator()``'s device functions on the CPU accelerator; ``defragment`` in ``stage3`` (through
the host, whole); ``deepspeed.comm.torch.build_shm_op`` (compiles for CPU runs); ``auto_ep._gate_activation_matches``
(0.19.8; looks at numbers); ``zero.linear._get_autocast_dtype``; ``FakeStore`` and the backend "fake" of torch's own
tests (torch 2.13; DeepSpeed 0.19.7, 0.19.8). A missing name raises. Expires when DeepSpeed can be set up without its
peers.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_zero3.substitution import substituted

# What sends data; the rest of torch.distributed only counts ranks, which the fake group does.
_SENDING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_DEVICE = "meta"


class _Done:
    """A collective that is over."""

    def wait(self, *_: Any) -> None:
        """There is nothing to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True


@contextmanager
def fake_world(rank: int, world_size: int, local_size: int) -> Iterator[None]:
    """Be one rank of a world; inside, DeepSpeed builds engines whose tensors are all on the meta device.

    Args:
        rank: Which one.
        world_size: Ranks.
        local_size: Ranks of a node.

    Raises:
        RuntimeError: This process has a process group already, or DeepSpeed was imported for another accelerator.
    """
    if torch.distributed.is_initialized():
        raise RuntimeError("A fake world needs a process without a process group: call lightning_zero3.plan.child's.")
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_SIZE": str(local_size),
        # Read by DeepSpeed, used by nobody.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with ExitStack() as scope:
        scope.enter_context(_environment(environment))
        scope.enter_context(_silent_process_group(rank, world_size))
        # First: some modules ask for the accelerator when they are imported.
        import deepspeed
        from deepspeed.comm import comm
        from deepspeed.module_inject import auto_ep
        from deepspeed.runtime.zero import linear, stage3

        scope.enter_context(_meta_accelerator())
        comm_torch = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch itself
        scope.enter_context(substituted(comm_torch, "build_shm_op", lambda: None))
        scope.enter_context(substituted(stage3, "defragment", _laid_out))
        scope.enter_context(substituted(comm, "cdb", None))
        # For routers that are tried out, on the host: there is no autocast on the meta device.
        dtype_on_host = functools.partial(linear._get_autocast_dtype, "cpu")
        scope.enter_context(substituted(linear, "_get_autocast_dtype", lambda _: dtype_on_host()))
        if hasattr(auto_ep, "_gate_activation_matches"):  # 0.19.8
            scope.enter_context(
                substituted(auto_ep, "_gate_activation_matches", _on_the_host(auto_ep._gate_activation_matches))
            )
        deepspeed.init_distributed(verbose=False)
        # What is made without a device: AutoEP's routers and experts.
        scope.enter_context(torch.device(_DEVICE))
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _silent_process_group(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def done(*_: Any, async_op: bool = False, **__: Any) -> Any:
        return _Done() if async_op else None

    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as scope:
            for name in _SENDING:
                scope.enter_context(substituted(torch.distributed, name, done))
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _meta_accelerator() -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        raise RuntimeError(f"A fake world needs DS_ACCELERATOR=cpu; this process has {accelerator.device_name()}.")
    answers = {
        "device_name": lambda *_: _DEVICE,
        "current_device_name": lambda: _DEVICE,
        "current_device": lambda: _DEVICE,
        "device": lambda *_: torch.device(_DEVICE),
        "set_device": lambda *_: None,
        "on_accelerator": lambda _: True,
    }
    with ExitStack() as scope:
        for name, answer in answers.items():
            scope.enter_context(substituted(accelerator, name, answer))
        yield


def _on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that looks at numbers, which the meta device doesn't have."""

    def run(*arguments: Any, **named: Any) -> Any:
        with torch.device("cpu"):
            return function(*arguments, **named)

    return run


def _laid_out(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layout that DeepSpeed's ``defragment`` makes, without the copy on the host."""
    buffer = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=_DEVICE)
    offset = 0
    for tensor in tensors:
        tensor.data = buffer.narrow(0, offset, tensor.numel())
        offset += tensor.numel()
    return buffer
