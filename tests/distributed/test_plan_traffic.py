# SPDX-License-Identifier: Apache-2.0
"""Bytes that a plan says are sent, against those of every real collective of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.collective_counts import COLLECTIVES
from lightning_zero3.plan.extract import structure_of
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.plan.traffic import traffic_of
from tests.fits import Language, Sentences, fit
from tests.models import build, tiny

LENGTH, SAMPLES = 16, 2
# Each kind of message, as the calls show it: who calls what, in which phase and with what elements.
NAMES = {
    ("forward", "all_gather_into_tensor"): "weights, forward",
    ("backward", "all_gather_into_tensor"): "weights, backward",
    ("backward", "reduce_scatter_tensor"): "gradients",
    ("step", "all_gather_into_tensor"): "persistent weights",
    ("step", "all_reduce"): "norms",
    ("forward", "all_reduce"): "tensor parallelism",
    ("backward", "all_reduce"): "tensor parallelism",
}


class CountBytes(pl.Callback):
    """Counts the larger buffer of every collective of the last step, by phase and kind."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.phase = ""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.phase == "":
            self._wrap()
        self.bytes.clear()  # of the last step alone: by then DeepSpeed knows the order of modules
        self.phase = "forward"

    def on_before_backward(self, *_: Any) -> None:
        self.phase = "backward"

    def on_after_backward(self, *_: Any) -> None:
        self.phase = "step"

    def on_train_batch_end(self, *_: Any) -> None:
        self.phase = "between"

    def _wrap(self) -> None:
        from deepspeed.comm import comm

        for name in COLLECTIVES:
            if hasattr(comm.cdb, name):
                setattr(comm.cdb, name, self._counted(name, getattr(comm.cdb, name)))

    def unwrap(self) -> None:
        from deepspeed.comm import comm

        for name in COLLECTIVES & set(vars(comm.cdb)):
            delattr(comm.cdb, name)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            given = [each for each in (*arguments, *options.values()) if torch.is_tensor(each)]
            ranks = torch.distributed.get_world_size(options.get("group"))
            if ranks > 1 and given:
                sizes = [each.numel() * each.element_size() for each in given]
                kind = NAMES.get((self.phase, name), f"{self.phase}: {name}")
                if name == "all_to_all_single":
                    # What is sent comes second; counts are whole numbers.
                    floating = given[1].is_floating_point()
                    kind, sizes = ("tokens" if floating else "counts of tokens"), sizes[1:2]
                self.bytes[kind] += max(sizes)
            return call(*arguments, **options)

        return counted


def planned_and_sent(
    expert_parallel_size: int | None, recompute: bool, reuse: int, family: str, tensor_parallel_size: int = 1
) -> Any:
    config = tiny(family)
    model = build(config)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    strategy = Zero3FastStrategy(
        expert_parallel_size=expert_parallel_size,
        tensor_parallel_size=tensor_parallel_size if tensor_parallel_size > 1 else None,
    )
    strategy.config["zero_optimization"].update(
        stage3_max_reuse_distance=reuse, stage3_param_persistence_threshold=100, stage3_prefetch_bucket_size=0
    )
    counter = CountBytes()
    try:
        trainer = fit(
            Language(model),
            Sentences(config.vocab_size, LENGTH),
            strategy,
            steps=4,
            callbacks=[counter],
            precision="bf16-mixed",
        )
    finally:
        counter.unwrap()
    engine = trainer.strategy.model
    structure = structure_of(engine.module, engine.optimizer, model_parameters=0)
    planned: Counter[str] = Counter()
    for message in traffic_of(
        structure,
        shape_of(config),
        tokens=LENGTH * SAMPLES,
        world_size=2,
        expert_parallel_size=expert_parallel_size or 1,
        tensor_parallel_size=tensor_parallel_size,
        recompute=recompute,
        max_reuse_distance=reuse,
    ):
        name = "tokens" if message.what in ("tokens to experts", "tokens from experts") else message.what
        planned[name] += message.buffer_bytes
    return dict(planned), dict(counter.bytes)


def compared(ranks: Any, *arguments: Any) -> Counter[str]:
    both = ranks(2).run(planned_and_sent, *arguments)
    # However tokens are spread over the experts, all ranks together send as many.
    planned, sent = (sum((Counter(rank[which]) for rank in both), Counter()) for which in (0, 1))
    assert planned == sent
    return sent


@pytest.mark.parametrize(
    ("expert_parallel_size", "recompute", "reuse"),
    [
        (2, False, 0),
        (2, True, 0),
        (1, False, 10**9),
        pytest.param(2, False, 60_000, marks=pytest.mark.slow),
        pytest.param(None, False, 0, marks=pytest.mark.slow),
    ],
)
def test_every_byte_is_planned(ranks: Any, expert_parallel_size: int | None, recompute: bool, reuse: int) -> None:
    sent = compared(ranks, expert_parallel_size, recompute, reuse, "glm")
    assert {"weights, forward", "gradients", "persistent weights", "norms"} <= set(sent)
    assert ("tokens" in sent) == (expert_parallel_size == 2)
    assert ("weights, backward" in sent) == (reuse < 10**9)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_every_byte_of_a_model_with_an_indexer(ranks: Any, recompute: bool) -> None:
    assert compared(ranks, 2, recompute, 0, "minimax")["weights, backward"] > 0


@pytest.mark.parametrize("family", ["minimax", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_every_byte_of_tensor_parallel_peers(ranks: Any, family: str) -> None:
    assert compared(ranks, None, family == "mixtral", 0, family, 2)["tensor parallelism"] > 0
