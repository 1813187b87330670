# SPDX-License-Identifier: Apache-2.0
"""``Zero3Profile`` on real ranks: no bit changes, all is put back, and its counts are those of other counters."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor, Zero3Profile
from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names
from lightning_zero3.metrics.profile_regions import OF_THE_OPTIMIZER
from tests.distributed.stock import StockOnCPU
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build_glm, tiny_glm

FIRST, LAST, STEPS = 3, 4, 6


class Wrapped(Callback):
    """Which of the wrapped methods stand on the engine and its optimizer around each batch, and DeepSpeed's backend."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.before: list[tuple[int, str]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.before.append(wrapped(trainer.strategy.model))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(wrapped(trainer.strategy.model))


class ManyRows(Regression):
    """Activations of so many rows that the few bytes which come and go by themselves are nothing beside them."""

    ROWS = 2_000

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([each.repeat(self.ROWS, 1) for each in batch], batch_idx)


def wrapped(engine: Any) -> tuple[int, str]:
    from deepspeed.comm import comm

    on_engine = {"forward", "backward", "step", "allreduce_gradients"} & vars(engine).keys()
    on_optimizer = OF_THE_OPTIMIZER.keys() & vars(engine.optimizer).keys()
    return len(on_engine) + len(on_optimizer), type(comm.cdb).__name__


def profiled(
    folder: str, options: dict[str, Any], accumulate: int, small: type[Regression] = Regression, **profile: Any
) -> dict[str, Any]:
    """The same fit without and with a profile: what differs, and what the profile says."""
    ranks = torch.distributed.get_world_size()
    runs = []
    for watched in (False, True):
        module = Language(build_glm(tiny_glm())) if ranks > 1 else small()
        monitor = Zero3Monitor(grad_clear_census=True, collective_census=True, progress_bar=False, summary=False)
        before_and_after = Wrapped()
        watching = [Zero3Profile((FIRST, LAST), folder=folder, **profile)] if watched else []
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            trainer = fit(
                module,
                Sentences(64, length=128) if ranks > 1 else Pairs(length=128),
                Zero3FastStrategy({"zero_optimization": {"sub_group_size": 300}}, **options),
                steps=STEPS,
                accumulate_grad_batches=accumulate,
                callbacks=[monitor, *watching, before_and_after],
            )
        runs.append((module.losses, tensors_of(optimizer_of(trainer))))
    (plain_losses, plain), (losses, tensors) = runs
    assert losses == plain_losses
    assert_equal_bits(tensors, plain)
    optimizer = optimizer_of(trainer)
    return {
        "wrapped": before_and_after.seen,
        "wrapped_before": before_and_after.before,
        "left": wrapped(trainer.strategy.model),
        "printed": printed.getvalue(),
        "visits": monitor.latest[names.GRAD_CLEAR_VISITS],
        "released": optimizer.release_visits,
        "collectives": monitor.latest[names.COLLECTIVES_PER_STEP],
        "parameters": sum(map(len, optimizer.fp16_groups)),
        "sub_groups": len(optimizer.fp16_groups),
    }


def of(report: dict[str, Any], *path: str) -> dict[str, Any]:
    (found,) = (phase for phase in report["phases"] if phase["path"] == ["whole step", *path])
    return found


def trace_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"rank_{rank}.steps_{FIRST}_to_{LAST}.pt.trace.json.gz")
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


STEP = ("engine step", "optimizer step")


@pytest.mark.parametrize("number", [1, 2])
def test_a_profile_changes_no_bit_and_counts_what_others_count(ranks, tmp_path, number):
    options = {"expert_parallel_size": 2} if number == 2 else {}
    accumulate = 2 if number == 2 else 1
    answers = ranks(number).run(profiled, str(tmp_path), options, accumulate)
    seen = answers[0]
    report = json.loads((tmp_path / "profile.json").read_text())
    assert (report["steps"], report["ranks"], report["device"]) == ([FIRST, LAST], number, None)

    # Wrapped in the chosen steps only.
    for answer in answers:
        assert {count for count, _ in answer["wrapped_before"][: (FIRST - 1) * accumulate]} == {0}
        during = answer["wrapped_before"][(FIRST - 1) * accumulate : LAST * accumulate]
        assert min(count for count, _ in during) > 10
        assert {backend for _, backend in during} == {"CountingBackend"}
        assert answer["wrapped"][LAST * accumulate - 1 :] == [answer["left"]] * ((STEPS - LAST) * accumulate + 1)
        assert answer["left"][0] == 0
        assert answer["left"][1] != "CountingBackend"

    # On a CPU nothing is measured on a device, and nothing stands for it.
    for phase in report["phases"]:
        assert phase["device_ms"] is None
        assert phase["kernels"] is None
        assert phase["cpu_ms"] >= 0
    assert of(report)["cpu_operations"] > of(report, "forward")["cpu_operations"] > 10
    assert (of(report)["calls"], of(report, "forward")["calls"]) == (1, accumulate)

    # As the censuses count, which stand elsewhere.
    inside = of(report, *STEP)
    assert inside["parameter_visits"] == seen["visits"] + seen["released"]
    assert inside["collectives"] == seen["collectives"]
    # Up to 0.19.7 norms are computed in the overflow check.
    parts = (of(report, *STEP, phase)["collectives"] for phase in ("overflow check", "norms", "persistent gather"))
    assert sum(parts) == inside["collectives"]
    assert of(report, "engine step", "gradient clear")["parameter_visits"] == seen["parameters"]
    assert seen["sub_groups"] > 2
    assert of(report, *STEP, "merged update", "optimizer call")["calls"] >= 1

    # A trace of each rank, with the regions, and the number of collectives that torch itself has seen.
    for rank in range(number):
        events = trace_of(tmp_path, rank)
        steps = [event for event in events if event["name"] in ("ProfilerStep#3", "ProfilerStep#4")]
        assert len(steps) == 2
        assert {event["name"] for event in events} >= {
            "zero3: whole step / forward",
            "zero3: whole step / backward",
            "zero3: whole step / engine step / optimizer step / norms",
        }
    # Those outside of all phases are Lightning's and the monitor's.
    events = trace_of(tmp_path, 0)
    phases = [event for event in events if event["name"].startswith("zero3: ")]
    launched = [event["ts"] for event in events if event["name"].startswith("c10d::")]
    within = [ts for ts in launched if any(each["ts"] <= ts < each["ts"] + each["dur"] for each in phases)]
    assert of(report)["collectives"] == len(within) / 2 > 0

    # The page and the terminal say the same.
    assert "no device" in seen["printed"]
    assert "persistent gather" in seen["printed"]
    page = (tmp_path / "profile.md").read_text()
    assert "| no device |" in page
    assert "| 0.00 | 0.00 |" not in page
    assert [answer["printed"] for answer in answers[1:]] == [""] * (number - 1)


def visits_of_each(folder: str) -> Any:
    options = {"batch_optimizer_step": False, "scoped_grad_clear": False, "skip_redundant_release": False}
    return profiled(folder, options, 1, ManyRows, memory=True, table=False)


def test_upstreams_loop_by_sub_group_and_memory(ranks, tmp_path):
    seen = ranks(1).run(visits_of_each, str(tmp_path))[0]
    report = json.loads((tmp_path / "profile.json").read_text())
    assert of(report, *STEP, "update sub-group")["calls"] == seen["sub_groups"]
    assert "merged update" not in {phase["phase"] for phase in report["phases"]}
    clears = [
        phase for phase in report["phases"] if phase["phase"] == "gradient clear" and phase["path"][1:3] == [*STEP]
    ]
    assert sum(phase["parameter_visits"] for phase in clears) == seen["visits"]
    # Upstream's release visits all modules, thrice, and nobody counts it.
    assert of(report, *STEP, "release")["parameter_visits"] is None
    assert of(report, *STEP)["parameter_visits"] is None
    # Activations live from forward to backward: at least the outputs of the three linear layers.
    activations = ManyRows.ROWS * (31 + 17 + 7) * 4 / 2**20
    assert of(report, "forward")["memory_peak_mib"] >= of(report, "forward")["memory_kept_mib"] > activations
    assert of(report, "backward")["memory_kept_mib"] < -activations / 2
    assert abs(of(report)["memory_kept_mib"]) < activations / 10
    assert "no memory snapshot" in report["notes"][0]
    assert seen["printed"] == ""


def interrupted(folder: str) -> Any:
    kept: list[Any] = []
    during: list[Any] = []

    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == FIRST:
                kept.append(self.trainer.strategy.model)
                during.append(wrapped(kept[0]))
                raise KeyError("as users' code does")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError):
        fit(Fails(), Pairs(), Zero3FastStrategy(), callbacks=[Zero3Profile((FIRST, LAST), folder=folder)], steps=STEPS)
    # torch's profiler is free again, too.
    with torch.profiler.profile() as again:
        torch.ones(2) + 1
    return during[0], wrapped(kept[0]), len(again.events())


def refused() -> list[str]:
    said = []
    for strategy, options in (("auto", {}), (StockOnCPU(stage=2), {}), (Zero3FastStrategy(), {"profiler": "pytorch"})):
        with pytest.raises(SetupError) as error:
            fit(Regression(), Pairs(), strategy, callbacks=[Zero3Profile()], **options)
        said.append(str(error.value))
    return said


def of_stock_and_too_short(folder: str) -> list[str]:
    """Stock's strategy, and a fit that ends in the middle and one before the first of the steps."""
    said = []
    for name, strategy, steps in (
        ("stock", StockOnCPU(stage=3), LAST),
        ("ends", Zero3FastStrategy(), FIRST),
        ("never", Zero3FastStrategy(), FIRST - 1),
    ):
        callback = Zero3Profile((FIRST, LAST), folder=f"{folder}/{name}", table=False)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(Regression(), Pairs(), strategy, steps=steps, callbacks=[callback])
        said.append(" ".join(str(each.message) for each in warned))
    return said


def test_it_ends_with_the_fit_whatever_ends_it(ranks, tmp_path):
    (during, after, events) = ranks(1).run(interrupted, str(tmp_path / "fails"))[0]
    assert during[0] > 10
    assert (after[0], events > 0) == (0, True)
    assert not (tmp_path / "fails").exists()
    said = ranks(1).run(of_stock_and_too_short, str(tmp_path))[0]
    stock = json.loads((tmp_path / "stock" / "profile.json").read_text())
    assert of(stock, *STEP)["calls"] == of(stock, *STEP, "update sub-group")["calls"] == 1
    assert json.loads((tmp_path / "ends" / "profile.json").read_text())["steps"] == [3, 3]
    assert not (tmp_path / "never").exists()
    assert ["took no such step" in each for each in said] == [False, False, True]


def test_what_it_does_not_know_is_refused(ranks):
    plain, two, torchs = ranks(1).run(refused)[0]
    assert "Stage 3" in plain
    assert "Stage 3" in two
    assert "one profiler at a time" in torchs
    for steps in ((0, 3), (4, 3), (5,), ("5", "6")):
        with pytest.raises(SetupError, match=r"such as \(5, 6\)"):
            Zero3Profile(steps)


pytestmark = pytest.mark.filterwarnings("ignore")
