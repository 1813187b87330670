# SPDX-License-Identifier: Apache-2.0
"""Out of memory: one line with phase, rank, size asked, where the memory is and what to change; then the error."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_zero3.metrics.memory import GIB, resident_bytes
from lightning_zero3.metrics.memory_parts import MASTERS, masters_are_weights, memory_by_part

_log = logging.getLogger(__name__)

SET_UP, FORWARD, BACKWARD, AFTER_BACKWARD = "set-up", "forward", "backward", "the end of backward"
STEP, VALIDATION, BETWEEN = "the optimizer step", "validation", "the time between two batches"

_ACTIVATIONS = (
    "a smaller micro-batch with more accumulate_grad_batches, shorter sequences, activation checkpointing, a lower "
    "stage3_max_live_parameters"
)
_STATES = "more ranks, or the optimizer on the host (strategy='zero3_fast_offload')"
REMEDIES = {
    SET_UP: f"{_STATES}; build the model in configure_model",
    FORWARD: f"{_ACTIVATIONS}, {_STATES}",
    BACKWARD: f"{_ACTIVATIONS}, a smaller reduce_bucket_size, {_STATES}",
    AFTER_BACKWARD: f"a smaller reduce_bucket_size, {_STATES}",
    STEP: f"a lower step_bytes_budget or sub_group_size, {_STATES}; the first step allocates the optimizer's states",
    VALIDATION: "a smaller batch in the validation loader, shorter sequences",
    BETWEEN: "a smaller batch, fewer data workers",
}
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# CUDA: "Tried to allocate 2.50 GiB"; CPU: "you tried to allocate 1024 bytes".
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB|B)\b")
_CPU_ALLOCATOR = "can't allocate memory"


class OutOfMemoryReport(Callback):
    """Follows the phases of a fit, so that an out-of-memory error can be explained. Costs nothing but assignments."""

    _phase = SET_UP
    _phase_before_validation = SET_UP

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """The engine is built next."""
        self._phase = SET_UP

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """The engine is built."""
        self._phase = BETWEEN

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A batch has arrived."""
        self._phase = FORWARD

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:  # noqa: ARG002
        """A forward has ended."""
        self._phase = BACKWARD

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """A backward has ended."""
        self._phase = AFTER_BACKWARD

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """The weights are updated next."""
        self._phase = STEP

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """The next batch is waited for."""
        self._phase = BETWEEN

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Between two batches, or before the first."""
        self._phase_before_validation, self._phase = self._phase, VALIDATION

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Back to training."""
        self._phase = self._phase_before_validation

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Explain an out-of-memory error; Lightning raises it afterwards, as any other."""
        error = out_of_memory_in(exception)
        if error is not None:
            # Each rank for itself: the others wait in a collective and will never say anything.
            _log.error(explanation(error, phase=self._phase, trainer=trainer))


def out_of_memory_in(exception: BaseException) -> BaseException | None:
    """The out-of-memory error that an exception is, or was raised from; None for any other.

    Args:
        exception: What was raised.
    """
    for each in _causes(exception):
        cpu = isinstance(each, RuntimeError) and _CPU_ALLOCATOR in str(each)
        if cpu or isinstance(each, (torch.OutOfMemoryError, MemoryError)):
            return each
    return None


def _causes(exception: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = exception
    while each is not None:
        yield each
        each = each.__cause__


def bytes_asked(error: BaseException) -> int | None:
    """How much was asked for, by the error's own words.

    Args:
        error: An out-of-memory error of torch's.

    Returns:
        Bytes; None where it doesn't say.
    """
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def explanation(error: BaseException, *, phase: str, trainer: Any) -> str:
    """The line.

    Args:
        error: The out-of-memory error.
        phase: What the fit was doing.
        trainer: The Trainer.
    """
    on_device = isinstance(error, torch.OutOfMemoryError)
    device = trainer.strategy.root_device if on_device else torch.device("cpu")
    asked = bytes_asked(error)
    size = "an unknown size" if asked is None else size_text(asked)
    try:
        where = _where(trainer, device, asked)
    except Exception as problem:  # whatever it is, it mustn't stand in front of the error itself
        where = f"unknown ({type(problem).__name__}: {problem})"
    return (
        f"Out of memory on rank {trainer.global_rank} ({'GPU' if device.type == 'cuda' else 'host'} memory) in {phase} "
        f"after {trainer.global_step} optimizer steps: {size} was asked for. Where the memory is: {where}. What helps: "
        f"{REMEDIES[phase]}."
    )


def _where(trainer: Any, device: torch.device, asked: int | None) -> str:
    engine = trainer.strategy.model
    parts = memory_by_part(engine, trainer.strategy.optimizers, device)
    texts = [f"{name} {size_text(size)}" for name, size in parts.items()]
    if masters_are_weights(engine):
        texts = [f"{text} (they are the weights)" if text.startswith(MASTERS) else text for text in texts]
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        hint = ""
        if asked is not None and unused >= asked:
            hint = ", enough, but in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        texts.append(f"reserved and unused {size_text(unused)}{hint}")
    else:
        texts.append(f"the process, resident {size_text(resident_bytes())}")
    return ", ".join(texts)


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(3 * 2**29), size_text(1000)
    ('1.50 GiB', '1000 bytes')
    """
    for unit, scale in (("GiB", GIB), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size} bytes"
