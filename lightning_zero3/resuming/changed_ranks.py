# SPDX-License-Identifier: Apache-2.0
"""Where a fit goes on when the number of data-parallel ranks has changed: at the same sample, as far as that goes.

Lightning counts batches of a rank. With half the ranks, an epoch has twice as many of them. What is each rank's own,
random numbers and sums over its batches, has no counterpart.

Upstream symbols: ``epoch_loop.batch_progress`` in what Lightning saves as ``loops``, ``combined_loader`` beside it
(Lightning 2.6.6). Detected by tests that compare with runs of an unchanged number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn


def position_of(trainer: Any) -> dict[str, int]:
    """What a number of batches is multiplied by to be one of samples; of steps, too.

    Args:
        trainer: A Trainer in fit.
    """
    strategy = trainer.strategy
    return {
        "data_parallel_size": strategy.parallel_layout.data_parallel_size,
        "batch_size": strategy.model.train_micro_batch_size_per_gpu(),
        "accumulate": trainer.accumulate_grad_batches,
    }


def are_changed(state: Mapping[str, Any], trainer: Any) -> bool:
    """Whether this rank isn't the one that saved, or sees other batches than that one.

    Args:
        state: What was saved of this rank, or of the first.
        trainer: A Trainer in fit.
    """
    own = trainer.global_rank, trainer.world_size
    saved = state.get("position", {}).get("data_parallel_size")
    other_lanes = saved not in (None, trainer.strategy.parallel_layout.data_parallel_size)
    return (state["rank"], state["world_size"]) != own or other_lanes


def carried_over(
    state: Mapping[str, Any], loops: Mapping[str, Any], trainer: Any, *, within_epoch: bool
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """A fit's state for other ranks; what can't be carried over is warned of.

    Args:
        state: What was saved of a rank.
        loops: What Lightning has saved as ``loops``.
        trainer: A Trainer in fit.
        within_epoch: Whether an epoch goes on.

    Returns:
        Both, changed.
    """
    lost = ["random states (dropout, and whatever else draws random numbers)"]
    results = state["results"]
    if results["logged"] or results["metrics"]:
        lost.append("the means of this epoch so far")
    state = {
        **state,
        "random": None,
        "random_before_fetch": None,
        "results": {**results, "logged": {}, "metrics": {}},
    }
    loops = {**loops, "fit_loop": copy.deepcopy(dict(loops["fit_loop"]))}
    loader = loops["fit_loop"]["state_dict"]
    if loader.pop("combined_loader", None):
        lost.append("the training loader's own state")
    saved, here = state.get("position"), position_of(trainer)
    if not within_epoch:
        said = "It goes on with a new epoch."
    elif saved is None or saved["data_parallel_size"] == here["data_parallel_size"]:
        said = "The position in the epoch is kept."
    else:
        said = moved(loops["fit_loop"], saved, here)
    rank_zero_warn(
        f"This checkpoint is of {state['world_size']} ranks, and this run has {trainer.world_size}, or another tensor "
        f"parallel size. What is each rank's own begins anew: {'; '.join(lost)}. {said}"
    )
    return state, loops


def moved(fit_loop: dict[str, Any], saved: Mapping[str, int], here: Mapping[str, int]) -> str:
    """Let an epoch go on after the same samples, with a whole step.

    Args:
        fit_loop: The loop's state in what Lightning saves; changed.
        saved: :func:`position_of` the run that has saved it.
        here: That of this run.

    Returns:
        What to tell the user.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    through = progress["current"]["processed"]
    samples = through * saved["data_parallel_size"] * saved["batch_size"]
    per_step = here["data_parallel_size"] * here["batch_size"] * here["accumulate"]
    batches = samples // per_step * here["accumulate"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] += batches - through
    before = saved["data_parallel_size"] * saved["batch_size"] * saved["accumulate"]
    parts = [f"The epoch goes on after {batches} batches of a rank here instead of {through}"]
    if again := samples - batches * here["data_parallel_size"] * here["batch_size"]:
        parts.append(f"; its last {again} samples are seen again")
    if before != per_step:
        parts.append(
            f". A step has {per_step} samples here and had {before} there: to go on as the unchanged run would, set "
            "accumulate_grad_batches so that it has as many"
        )
    return "".join(parts) + "."
