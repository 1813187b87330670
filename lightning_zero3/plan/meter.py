# SPDX-License-Identifier: Apache-2.0
"""Live bytes of tensor storage by kind, on the meta device: memory that isn't there, counted as if it were.

Upstream symbols (torch 2.13): ``torch.utils._python_dispatch.TorchDispatchMode``, which sees every operation;
``UntypedStorage._cdata``, by which two tensors are known to share memory where there is no address;
``aten._local_scalar_dense``, a number read off a tensor; ``torch._C._current_graph_task_id``, whether a backward runs.
Detected by the tests that compare plans with live tensors. Expires when torch counts meta memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HELD, ACTIVATIONS, GATHERED, GRADIENTS, REDUCTION, LOGITS, UPDATE = (
    "held",
    "activations",
    "gathered",
    "gradients",
    "reduction",
    "logits",
    "update",
)


@dataclass
class _Storage:
    alive: Any
    bytes: int
    kind: str


class StorageMeter(TorchDispatchMode):
    """Counts each storage on the meta device once, from the operation that made it until its last tensor is gone.

    What lives at the start is ``held``. What an operator allocates and frees within itself isn't seen, on the meta
    device as little as anywhere else.

    Args:
        gradient_shapes: Shapes of trained parameters as they are gathered: in backward, a new tensor of such a shape is
            taken for that parameter's gradient.
        logits: Elements of all logits; a tensor of as many is taken for them, a copy of them or their gradient.
        answer: What a truth value that data would decide is taken to be.
    """

    def __init__(
        self, *, gradient_shapes: Collection[tuple[int, ...]] = (), logits: int | None = None, answer: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = frozenset(gradient_shapes) | {shape[::-1] for shape in gradient_shapes if len(shape) == 2}
        self._logits = logits
        self._answer = answer
        self._known: dict[int, _Storage] = {}
        self._within: str | None = HELD
        self.live: dict[str, int] = {}
        gc.collect()
        for thing in gc.get_objects():
            # By type: whatever else is there may have a __class__ that answers anything.
            if issubclass(type(thing), torch.Tensor) and thing.is_meta:
                self._add(thing)
        self._within = None
        self.held = self.now = self.live.get(HELD, 0)
        self.peak = self.now
        # By kind at the peak, and the most of each kind at any moment.
        self.at_peak: Mapping[str, int] = dict(self.live)
        self.most: dict[str, int] = dict(self.live)

    @contextmanager
    def within(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind.

        Args:
            kind: One of this module's names.
        """
        before, self._within = self._within, kind
        try:
            yield
        finally:
            self._within = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what is new."""
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer if args[0].dtype is torch.bool else 1
        result = function(*args, **(kwargs or {}))
        for thing in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(thing, torch.Tensor) and thing.is_meta:
                self._add(thing)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known.alive() is not None:
            return
        size = storage.nbytes()
        kind = self._within or self._kind_of(tensor)
        self._known[key] = _Storage(weakref.ref(storage, partial(self._gone, key)), size, kind)
        self.live[kind] = self.live.get(kind, 0) + size
        self.now = sum(self.live.values())
        if self._within == HELD:
            return
        self.most[kind] = max(self.most.get(kind, 0), self.live[kind])
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.live)

    def _kind_of(self, tensor: torch.Tensor) -> str:
        if tensor.numel() == self._logits and tensor.is_floating_point():
            return LOGITS
        in_backward = torch._C._current_graph_task_id() != -1
        return GRADIENTS if in_backward and tuple(tensor.shape) in self._shapes else ACTIVATIONS

    def _gone(self, key: int, _: Any) -> None:
        storage = self._known.pop(key, None)
        if storage is not None:
            self.live[storage.kind] -= storage.bytes
            self.now -= storage.bytes
