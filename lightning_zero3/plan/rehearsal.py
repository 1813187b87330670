# SPDX-License-Identifier: Apache-2.0
"""A planned run's first steps, in DeepSpeed's own code, on tensors without memory: what lives when.

The engine of a fake world runs micro-steps and optimizer steps as a training run does: DeepSpeed's hooks fetch,
prefetch and release parameters, its buckets fill and are reduced, torch's autograd keeps what it keeps. A meter counts
storages. So transients that a formula would miss are there: what a coalesced gather copies, what a bucket leaves
behind, what a view of a gathered weight keeps alive.

Upstream symbols, wrapped for the length of a rehearsal to tell whose memory is whose:
``PartitionedParameterCoordinator.fetch_sub_module``; ``reduce_ready_partitions_and_remove_grads`` and
``independent_gradient_partition_epilogue`` of ``DeepSpeedZeroOptimizer_Stage3``; ``_device_dtype_check_for_fused`` of
torch's Adam (0.19.7, 0.19.8; torch 2.13). A missing name raises. Expires when torch says what an allocation is for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_zero3.plan.meter import GATHERED, HELD, REDUCTION, UPDATE, StorageMeter
from lightning_zero3.plan.stand_ins import stand_ins
from lightning_zero3.plan.tiles import tiled_loss
from lightning_zero3.substitution import substituted

# DeepSpeed looks in the first micro-step, records in the second what is fetched when, and prefetches from the third.
MICRO_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that lives in a phase, beyond what is held between steps.

    Args:
        bytes: At the peak.
        by_kind: Of these, by kind (:mod:`lightning_zero3.plan.meter`).
        most: The most of each kind at any moment of the phase; not all at once.
    """

    bytes: int
    by_kind: Mapping[str, int]
    most: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the first steps were like.

    Args:
        recompute_activations: Whether layers were computed again in backward.
        loss_tiles: In how many pieces the loss was computed.
        held: Bytes between steps; None where only a part of the model was rehearsed.
        forward_backward: Of a micro-step, prefetching.
        step: Of an optimizer step of zero3_fast.
        stock_step: Of one through upstream's code.
    """

    recompute_activations: bool
    loss_tiles: int
    held: int | None
    forward_backward: Peak
    step: Peak
    stock_step: Peak

    def to_json(self) -> dict[str, Any]:
        """All of it as what JSON knows."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rehearsal:
        """What :meth:`to_json` has written."""
        peaks = {name: Peak(**value) for name, value in data.items() if isinstance(value, Mapping)}
        return cls(**{**data, **peaks})


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is rehearsed.

    Args:
        sequence_length: Tokens of a sample.
        micro_batch_size: Samples.
        recompute_activations: Whether layers are computed again in backward.
        loss_tiles: Pieces in which logits and loss are computed; 1 is Transformers' own loss.
        gpu: Kernels of GPUs, or of CPUs.
        block_sparse_kernel: Whether MiniMax-M3's sparse attention is a kernel's, or Transformers' own.
        optimizer: How torch's Adam works: ``fused`` (also DeepSpeed's FusedAdam), ``foreach`` (torch's default on GPUs)
            or ``loop`` (its default on CPUs).
    """

    sequence_length: int
    micro_batch_size: int = 1
    recompute_activations: bool = False
    loss_tiles: int = 1
    gpu: bool = True
    block_sparse_kernel: bool = False
    optimizer: str = "fused"


def rehearse(engine: Any, model: Any, scene: Scene) -> Rehearsal:
    """Run micro-steps and steps of an engine in a fake world.

    Args:
        engine: Built by :mod:`lightning_zero3.plan.build`.
        model: The Hugging Face model in it.
        scene: How.
    """
    _set_recomputation(model, scene.recompute_activations)
    stage3 = engine.optimizer
    for group in stage3.optimizer.param_groups:
        group["fused"], group["foreach"] = scene.optimizer == "fused", scene.optimizer == "foreach"
    engine.train()
    adam = importlib.import_module("torch.optim.adam")
    kernels = stand_ins(gpu=scene.gpu, block_sparse_kernel=scene.block_sparse_kernel)
    with kernels, substituted(adam, "_device_dtype_check_for_fused", lambda *_, **__: None):
        # The first step makes the moments; of the others, one goes through upstream's code.
        steps: list[tuple[Peak, int]] = []
        for number in range(MICRO_STEPS):
            micro_step = _micro_step(engine, model, scene)
            with _through_upstream(stage3) if number == 1 else nullcontext():
                steps.append(_step(engine))
        (_, (stock_step, _), (step, held)) = steps
    return Rehearsal(
        recompute_activations=scene.recompute_activations,
        loss_tiles=scene.loss_tiles,
        held=held,
        forward_backward=micro_step,
        step=step,
        stock_step=stock_step,
    )


def _set_recomputation(model: Any, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _micro_step(engine: Any, model: Any, scene: Scene) -> Peak:
    ids = torch.zeros(scene.micro_batch_size, scene.sequence_length, dtype=torch.long, device="meta")
    shapes = {tuple(p.ds_shape) for p in model.parameters() if p.requires_grad and p.ds_numel > 1}
    logits = -(-ids.numel() // scene.loss_tiles) * model.config.vocab_size  # of one tile
    # True: that a batch's positions are one sequence, which Transformers asks of them.
    meter = StorageMeter(gradient_shapes=shapes, logits=logits, answer=True)
    with meter, _told_apart(engine, meter), torch.device("meta"):
        # As a LightningModule's training step, which DeepSpeed calls through its root.
        with _forward_of(engine.module, lambda: _loss(model, ids, scene.loss_tiles)):
            loss = engine()
        engine.backward(loss)
        del loss
    return _peak(meter)


@contextmanager
def _forward_of(root: Any, forward: Any) -> Iterator[None]:
    root.forward = forward
    try:
        yield
    finally:
        del root.forward


def _loss(model: Any, ids: torch.Tensor, tiles: int) -> Any:
    return tiled_loss(model, ids, tiles) if tiles > 1 else model(input_ids=ids, labels=ids, use_cache=False).loss


def _step(engine: Any) -> tuple[Peak, int]:
    with StorageMeter() as meter, meter.within(UPDATE):
        engine.step()
    # What is made once and kept, as moments in the first step, isn't the step's own.
    update = {UPDATE: max(0, meter.peak - max(meter.held, meter.now))}
    return Peak(bytes=update[UPDATE], by_kind=update, most=update), meter.now


def _peak(meter: StorageMeter) -> Peak:
    def transient(by_kind: Mapping[str, int]) -> dict[str, int]:
        return {kind: size for kind, size in by_kind.items() if size and kind != HELD}

    return Peak(bytes=meter.peak - meter.held, by_kind=transient(meter.at_peak), most=transient(meter.most))


@contextmanager
def _told_apart(engine: Any, meter: StorageMeter) -> Iterator[None]:
    """Label what DeepSpeed allocates for gathering and for reducing."""
    stage3 = engine.optimizer
    with ExitStack() as scope:
        for owner, name, kind in (
            (type(stage3._get_param_coordinator()), "fetch_sub_module", GATHERED),
            (stage3, "reduce_ready_partitions_and_remove_grads", REDUCTION),
            (stage3, "independent_gradient_partition_epilogue", REDUCTION),
        ):
            scope.enter_context(substituted(owner, name, _labelled(getattr(owner, name), meter, kind)))
        yield


def _labelled(function: Any, meter: StorageMeter, kind: str) -> Any:
    def labelled(*arguments: Any, **named: Any) -> Any:
        with meter.within(kind):
            return function(*arguments, **named)

    return labelled


@contextmanager
def _through_upstream(stage3: Any) -> Iterator[None]:
    """Inside, the optimizer's parts that replace upstream's stand aside."""
    before = stage3.switches
    names = ("coalesce_grad_norms", "batch_optimizer_step", "coalesce_persistent_gather", "skip_redundant_release")
    stage3.switches = replace(before, **dict.fromkeys(names, False))
    try:
        yield
    finally:
        stage3.switches = before
