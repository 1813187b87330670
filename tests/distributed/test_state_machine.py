# SPDX-License-Identifier: Apache-2.0
"""Random lives of an aliased optimizer and of one with a forced copy: after each event every tensor is compared.

Hypothesis draws in the test's own process and sends each event to all ranks, so they all draw the same. ::

    ALIAS_SEQUENCES=2000 python -m pytest tests/distributed/test_state_machine.py -m slow
"""

import gc
import os
import tempfile
import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lightning_zero3 import Zero3Options
from tests.engines import PRECISIONS, assert_agreement, assert_aliased, batch_of, build
from tests.fits import assert_equal_bits, tensors_of

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
PARAMETERS = 6
EVENTS = 20

# --- what runs on the ranks ------------------------------------------------------------------------------------------

_PAIR: dict[str, Any] = {}


def event(name: str, *arguments: Any) -> str:
    """Let something happen to both engines and compare them; a failure comes back as text, so that ranks live on."""
    try:
        globals()[f"_{name}"](*arguments)
        ours, copied = (tensors_of(engine.optimizer) for engine in _PAIR["engines"])
        assert_equal_bits(ours, copied)
        assert _PAIR["engines"][0].module.losses == _PAIR["engines"][1].module.losses
        assert_aliased(_PAIR["engines"][0].optimizer)
        assert not _PAIR["engines"][1].optimizer.aliased_sub_groups()
        for engine in _PAIR["engines"]:
            assert_agreement(engine)
    except Exception:
        return traceback.format_exc()
    return ""


def _born(precision: str, folder: str, persistence: int) -> None:
    _PAIR["folder"] = folder
    _PAIR["step"] = 0
    _PAIR["engines"] = [
        build(
            options=Zero3Options(alias_master_weights=alias),
            zero={"stage3_param_persistence_threshold": persistence},
            gradient_accumulation_steps=2,
            gradient_clipping=1.0,
            **PRECISIONS[precision],
        )
        for alias in (True, False)
    ]
    # Moments are made by the first step.
    for _ in range(2):
        _micro_step(1.0)
    # Each offload collects garbage, and must not walk through all engines of the lives before.
    gc.freeze()


def _micro_step(scale: float) -> None:
    for engine in _PAIR["engines"]:
        loss = engine(batch_of(engine, _PAIR["step"]), _PAIR["step"])
        engine.backward(loss * scale)
        engine.step()
    # NaNs are no equal numbers.
    for engine in _PAIR["engines"]:
        engine.module.losses = [loss for loss in engine.module.losses if loss == loss]
    _PAIR["step"] += 1


def _offload(include: tuple[str, ...] | None, pinned: bool, non_blocking: bool) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    states = None if include is None else [OffloadStateTypeEnum(name) for name in include]
    # The copy never moves: stock's own ways of moving have faults that ours is to be free of.
    _PAIR["engines"][0].offload_states(include=states, pin_memory=pinned, non_blocking=non_blocking)


def _reload(non_blocking: bool) -> None:
    _PAIR["engines"][0].reload_states(non_blocking=non_blocking)


def _save(tag: int) -> None:
    for name, engine in zip(("aliased", "copied"), _PAIR["engines"], strict=True):
        engine.save_checkpoint(f"{_PAIR['folder']}/{name}", tag=str(tag))


def _load(tag: int, crosswise: bool) -> None:
    names = ["copied", "aliased"] if crosswise else ["aliased", "copied"]
    for name, engine in zip(names, _PAIR["engines"], strict=True):
        engine.load_checkpoint(f"{_PAIR['folder']}/{name}", tag=str(tag))
        # Lightning starts accumulation anew after a load.
        engine.optimizer.zero_grad()


def _parameters(index: int) -> list[Any]:
    return [list(engine.module.parameters())[index] for engine in _PAIR["engines"]]


def _gathered_edit(index: int, elements: tuple[int, ...], value: float) -> None:
    import deepspeed

    for parameter in _parameters(index):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                for element in elements:
                    parameter.data.view(-1)[element % parameter.ds_numel] = value


def _master_edit(index: int, seed: int, whole: bool) -> None:
    import deepspeed

    for parameter in _parameters(index):
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(tuple(parameter.ds_shape), generator=generator)
        if whole:
            deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        else:
            size, rank = parameter.partition_numel(), torch.distributed.get_rank()
            flat = torch.nn.functional.pad(value.flatten(), (0, size))
            deepspeed.utils.safe_set_local_fp32_param(parameter, flat[rank * size : (rank + 1) * size])


def _moment_edit(index: int, value: float) -> None:
    import deepspeed

    for parameter in _parameters(index):
        full = torch.full(tuple(parameter.ds_shape), value)
        deepspeed.utils.safe_set_full_optimizer_state(parameter, full, "exp_avg")


def _refresh() -> None:
    for engine in _PAIR["engines"]:
        engine.optimizer.refresh_fp32_params()


def _evaluate() -> None:
    with torch.no_grad():
        for engine in _PAIR["engines"]:
            engine.eval()
            engine(batch_of(engine, 7), 7)
            engine.train()


SUBSETS = st.one_of(st.none(), st.sets(st.sampled_from(STATES)).map(lambda states: tuple(sorted(states))))

# --- what draws ------------------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """What may happen when: no training and no loading while states are away."""

    pool: Any
    precision: str
    happened: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.away = 0
        self.saved: list[int] = []
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    def happen(self, name: str, *arguments: Any) -> None:
        self.happened[name] = self.happened.get(name, 0) + 1
        failures = [answer for answer in self.pool.run(event, name, *arguments) if answer]
        assert not failures, "\n".join(failures)

    @initialize(persistence=st.sampled_from([0, 20, 10**9]))
    def born(self, persistence: int) -> None:
        self.happen("born", self.precision, self.folder.name, persistence)

    @precondition(lambda self: not self.away)
    @rule()
    def micro_step(self) -> None:
        self.happen("micro_step", 1.0)

    @precondition(lambda self: not self.away)
    @rule()
    def train_step(self) -> None:
        self.happen("micro_step", 1.0)
        self.happen("micro_step", 1.0)

    @precondition(lambda self: not self.away)
    @rule()
    def overflow_step(self) -> None:
        self.happen("micro_step", float("nan"))

    @precondition(lambda self: self.away < 2)
    @rule(include=SUBSETS, pinned=st.booleans(), non_blocking=st.booleans())
    def offload(self, include: tuple[str, ...] | None, pinned: bool, non_blocking: bool) -> None:
        self.happen("offload", include, pinned, non_blocking)
        self.away += 1

    @rule(include=SUBSETS, pinned=st.booleans(), non_blocking=st.booleans())
    def round_trip(self, include: tuple[str, ...] | None, pinned: bool, non_blocking: bool) -> None:
        self.happen("offload", include, pinned, non_blocking)
        self.happen("reload", non_blocking)
        self.away = 0

    @precondition(lambda self: self.away)
    @rule(non_blocking=st.booleans())
    def reload(self, non_blocking: bool) -> None:
        self.happen("reload", non_blocking)
        self.away = 0

    @rule(tag=st.integers(0, 1))
    def save(self, tag: int) -> None:
        self.happen("save", tag)
        self.saved.append(tag)

    @precondition(lambda self: bool(self.saved) and not self.away)
    @rule(choice=st.integers(0, 9), crosswise=st.booleans())
    def load(self, choice: int, crosswise: bool) -> None:
        self.happen("load", self.saved[choice % len(self.saved)], crosswise)

    @rule(
        index=st.integers(0, PARAMETERS - 1),
        elements=st.lists(st.integers(0, 600), max_size=3).map(tuple),
        value=st.floats(-2, 2, width=32),
    )
    def gathered_edit(self, index: int, elements: tuple[int, ...], value: float) -> None:
        self.happen("gathered_edit", index, elements, value)

    @rule(index=st.integers(0, PARAMETERS - 1), seed=st.integers(0, 99), whole=st.booleans())
    def master_edit(self, index: int, seed: int, whole: bool) -> None:
        self.happen("master_edit", index, seed, whole)

    @rule(index=st.integers(0, PARAMETERS - 1), value=st.floats(-1, 1, width=32))
    def moment_edit(self, index: int, value: float) -> None:
        self.happen("moment_edit", index, value)

    @rule()
    def refresh_fp32_params(self) -> None:
        self.happen("refresh")

    @rule()
    def evaluate(self) -> None:
        self.happen("evaluate")


def live(pool: Any, precision: str, sequences: int, derandomize: bool) -> dict[str, int]:
    """Run that many lives and return how often each event happened."""
    happened: dict[str, int] = {}
    machine = type("Life", (Life,), {"pool": pool, "precision": precision, "happened": happened})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=EVENTS,
            deadline=None,
            database=None,
            derandomize=derandomize,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return happened


@pytest.mark.parametrize(("world_size", "sequences"), [(1, 25), (2, 5)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16 masters", marks=pytest.mark.slow)])
def test_lives(ranks, precision, world_size, sequences):
    happened = live(ranks(world_size), precision, sequences, derandomize=True)
    assert happened["born"] >= sequences
    assert len(happened) >= 10, happened


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16 masters"])
def test_many_lives(ranks, precision, world_size):
    sequences, pool = int(os.environ.get("ALIAS_SEQUENCES", "2000")) // 4, ranks(world_size)
    total: Counter[str] = Counter()
    for _ in range(0, sequences, 100):
        happened = live(pool, precision, min(100, sequences), derandomize=False)
        pool.close()  # what the lives before have left in memory
        total.update(happened)
    print(f"{precision}, {world_size} ranks: {dict(total)}")
    assert total["born"] >= sequences
