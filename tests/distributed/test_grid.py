# SPDX-License-Identifier: Apache-2.0
"""Every cell of docs/combinations.md's grid that says "tested": a fit through a Trainer beside plain Transformers.

By default a set of cells in which every pair of settings occurs, and one that is compiled; all of them by
``-m "slow or not slow"``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.capabilities.grid import Cell, cells, refusal_of
from lightning_zero3.config import ConfigConflictError
from tests.fits import QUIET, Language, Sentences
from tests.grid_runs import Outcome, options, run_cell, signs_of

# Largest differences of (losses; gradient norms, relative; weights' movement, relative). In fp32: of sums in another
# order. In 16 bits the parallel forms round in other places, and plain bf16 is itself this far from fp32.
BOUNDS = {"32-true": (1e-5, 1e-5, 1e-4), "bf16-mixed": (4e-2, 2e-2, 0.1)}
BOUNDS |= dict.fromkeys(("bf16-true", "autocast"), BOUNDS["bf16-mixed"])


def pairs_of(cell: Cell) -> set[Any]:
    """Every two settings that meet in a cell."""
    return set(itertools.combinations(dataclasses.asdict(cell).items(), 2))


def covering(chosen: list[Cell]) -> list[Cell]:
    """Few ones of ``chosen`` in which every pair of settings occurs that occurs in any of them.

    Greedy: the cell with the most new pairs, the first of equals; on two ranks as far as that goes.
    """
    left = set().union(*map(pairs_of, chosen))
    picked: list[Cell] = []
    for ranks_at_most in (2, 4):
        pool = [cell for cell in chosen if cell.world_size <= ranks_at_most]
        while True:
            best = max(pool, key=lambda cell: len(pairs_of(cell) & left))
            if not pairs_of(best) & left:
                break
            picked.append(best)
            left -= pairs_of(best)
    return picked


SIMPLE = Cell(1, 1, "none", "32-true", "none", False, "whole")
REFUSED = [cell for cell in cells() if refusal_of(cell) is not None]
RUN = [cell for cell in cells() if cell not in REFUSED]
QUICK = [cell for cell in RUN if not cell.compiled]
# The last: AutoEP's layers in fp32 failed when they were compiled.
BY_DEFAULT = [*covering(QUICK), Cell(2, 1, "none", "32-true", "none", True, "whole")]
PARAMETERS = [
    pytest.param(cell, id=cell.name, marks=() if cell in BY_DEFAULT else pytest.mark.slow)
    for cell in sorted(RUN, key=lambda cell: cell.world_size)
]


def outcome_of(*arguments: Any) -> Outcome:
    return run_cell(*arguments)


REFUSALS = [
    pytest.param(cell, id=cell.name, marks=() if cell == dataclasses.replace(SIMPLE, **sizes) else pytest.mark.slow)
    for cell in REFUSED
    for sizes in [{axis: getattr(cell, axis) for axis in ("experts", "tensors", "offload")}]
]


def check(ranks: Any, cell: Cell, folder: str, backend: str = "eager") -> None:
    for outcome in ranks(cell.world_size).run(outcome_of, cell, folder, backend):
        assert outcome.signs == signs_of(cell)
        seen = (outcome.loss, outcome.norm, outcome.weights)
        within = [value < bound for value, bound in zip(seen, BOUNDS[cell.precision], strict=True)]
        assert all(within), f"differences of losses, norms, weights: {seen}"


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_cell_trains_as_plain_transformers_do(ranks, tmp_path, cell, request):
    if cell.offload == "nvme":
        request.getfixturevalue("async_io")
    check(ranks, cell, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("experts", "tensors"), [(1, 1), (2, 1), (1, 2)])
def test_code_that_is_really_compiled(ranks, tmp_path, experts, tensors, precision, backend):
    check(ranks, Cell(experts, tensors, "none", precision, "none", True, "configure_model"), str(tmp_path), backend)


def test_every_pair_of_settings_is_run_by_default():
    assert len(BY_DEFAULT) < len(RUN) / 10
    assert set().union(*map(pairs_of, BY_DEFAULT)) >= set().union(*map(pairs_of, QUICK))


@pytest.mark.parametrize("precision", BOUNDS)
def test_the_bounds_see_a_gradient_that_is_a_little_too_large(ranks, tmp_path, precision):
    cell = dataclasses.replace(SIMPLE, precision=precision)
    for outcome in ranks(2).run(outcome_of, cell, str(tmp_path), "eager", 1.03):
        assert outcome.norm > BOUNDS[precision][1]


@pytest.mark.parametrize("cell", REFUSALS)
def test_a_refused_cell_says_so_before_any_process_group(tmp_path, cell):
    strategy, precision = options(cell, str(tmp_path))
    with pytest.raises(ConfigConflictError, match=re.escape(refusal_of(cell).message)):
        fit_alone(torch.nn.Linear(2, 2), Zero3FastStrategy(**strategy), **precision)
    assert not torch.distributed.is_initialized()


def fit_alone(model: Any, strategy: Any, **options: Any) -> None:
    module = torch.compile(Language(model), backend="eager") if options.pop("wrapped", False) else Language(model)
    trainer = Trainer(**QUIET, strategy=strategy, devices=1, max_steps=1, **options)
    trainer.fit(module, DataLoader(Sentences(64), batch_size=2))


def test_a_whole_module_that_was_wrapped_is_refused_by_lightning():
    with pytest.raises(RuntimeError, match="Using a compiled model is incompatible with the current strategy"):
        fit_alone(torch.nn.Linear(2, 2), Zero3FastStrategy(), wrapped=True)
    assert not torch.distributed.is_initialized()
