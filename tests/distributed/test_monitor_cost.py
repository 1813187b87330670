# SPDX-License-Identifier: Apache-2.0
"""What ``Zero3Monitor`` adds to a step: nothing where nothing is logged, one collective where something is."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.metrics import names
from lightning_zero3.substitution import substituted
from tests.fits import Language, Sentences, fit
from tests.models import build_glm, tiny_glm

LOG_EVERY = 3
STEPS = 6
SEEN: Counter[str] = Counter()


class Event:
    """An accelerator's event: counts what is done with it, and tells the time."""

    def __init__(self, enable_timing: bool = False) -> None:
        SEEN["events"] += 1

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        SEEN["waits"] += 1

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


class Stream:
    def wait_event(self, event: Event) -> None:
        SEEN["waits"] += 1


class CountOperations(TorchDispatchMode):
    """Every operation on tensors, so every allocation, too."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN["operations"] += 1
        return function(*args, **(kwargs or {}))


class OfEachStep(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        SEEN.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(dict(SEEN))


def an_accelerators_events(scope: ExitStack) -> None:
    """DeepSpeed's accelerator for a CPU times by the host's clock; for this test as a GPU's does, by events."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    scope.enter_context(substituted(accelerator, "use_host_timers", lambda _: False))
    scope.enter_context(substituted(accelerator, "Event", Event))
    scope.enter_context(substituted(accelerator, "current_stream", lambda *_: Stream()))
    scope.enter_context(substituted(accelerator, "synchronize", lambda *_: SEEN.update(["synchronisations"])))
    for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor"):
        scope.enter_context(substituted(torch.distributed, name, counted(getattr(torch.distributed, name))))


def counted(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        SEEN["collectives"] += 1
        return function(*args, **kwargs)

    return call


def steps(monitored: bool, config: dict[str, Any] | None = None) -> Any:
    from deepspeed.runtime import engine

    monitor, each, printed = Zero3Monitor(peak_flops=1e12, progress_bar=False), OfEachStep(), []
    with ExitStack() as scope:
        an_accelerators_events(scope)
        real = engine.log_dist
        scope.enter_context(
            substituted(engine, "log_dist", lambda text, *a, **k: (printed.append(str(text)), real(text, *a, **k)))
        )
        scope.enter_context(CountOperations())
        fit(
            Language(build_glm(tiny_glm())),
            Sentences(64),
            Zero3FastStrategy(config, expert_parallel_size=2),
            steps=STEPS,
            log_every_n_steps=LOG_EVERY,
            callbacks=[monitor, each] if monitored else [each],
        )
    return each.steps, dict(monitor.latest), [text for text in printed if "time (ms)" in text]


def test_a_step_that_is_not_logged_has_nothing_of_it(ranks):
    without, with_monitor = ranks(2).run(steps, False), ranks(2).run(steps, True)
    for (plain, _, _), (monitored, latest, printed) in zip(without, with_monitor, strict=True):
        assert len(plain) == len(monitored) == STEPS
        for step, (stock, ours) in enumerate(zip(plain, monitored, strict=True)):
            if (step + 1) % LOG_EVERY:
                assert ours == stock, step
                assert "events" not in ours
            else:
                # Two for each part that is timed, read once; one collective for all values, router counts included.
                assert ours["events"] >= 2 * 10
                assert ours["waits"] == ours["events"]
                assert ours["collectives"] == stock["collectives"] + 1
                assert ours.get("synchronisations") == stock.get("synchronisations")
        assert {names.DEAD_EXPERTS, names.MFU, names.BWD_INNER, names.OPTIMIZER_STEP} <= latest.keys()
        assert printed == []


def test_without_it_deepspeed_waits_in_every_step(ranks):
    # The reason for all of this: if it ends upstream, ours may go.
    seen, _, printed = ranks(2).run(steps, False, {"wall_clock_breakdown": True})[0]
    assert all(step["waits"] > 0 for step in seen)
    assert printed


pytestmark = pytest.mark.filterwarnings("ignore")
