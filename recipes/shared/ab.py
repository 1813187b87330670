# SPDX-License-Identifier: Apache-2.0
"""``--ab SWITCH``: one recipe with a switch (or all of them) off and on, in the same processes, and what that changes.

Fits alternate (A B, B A, ...), so that whatever the machine does meanwhile falls on both arms. Each has the model,
seed and data of the other, so losses can be compared to the bit; each gives its memory back before the next begins, so
it takes no more than an ordinary run. The runs are ordinary ones, for ``lightning-zero3 compare`` to read again.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_zero3.capabilities.fixes import UPSTREAM_FIXES, parts_to_leave_out
from lightning_zero3.compare.charts import draw
from lightning_zero3.compare.read import read_run
from lightning_zero3.compare.report import assemble
from lightning_zero3.compare.tables import markdown, show
from lightning_zero3.config import SetupError, Switch
from shared import gpu_memory
from shared.noise import without_known_noise
from shared.run import fit, prepare
from shared.settings import Settings

if TYPE_CHECKING:
    from shared.recipe import Recipe

ARMS = {"a": ("off", False), "b": ("on", True)}


class SameCodeError(SetupError):
    """Both arms would run the same code, so there is nothing to compare."""

    exit_status = 2


@without_known_noise()
def train_both(recipe: Recipe, settings: Settings) -> Path:
    """Train both arms in alternation, and print and keep the comparison.

    Args:
        recipe: The architecture.
        settings: How to train it; ``ab`` names the switch, or is ``all``.

    Returns:
        The folder with ``comparison.json``, ``.md`` and ``.png``.

    Raises:
        SameCodeError: The switch makes no difference here; before any process is started.
        SetupError: As for an ordinary run.
    """
    switch = settings.ab
    assert switch is not None
    same = why_the_same(settings)
    if same is not None:
        raise SameCodeError(f"--ab {switch}: both arms would run the same code. {same}")
    arms: dict[str, Settings] = {}
    for arm, (_, on) in ARMS.items():
        chosen: dict[str, Any] = dict.fromkeys(get_args(Switch) if switch == "all" else [switch], on)
        arms[arm] = replace(settings, **chosen)
    prepared = prepare(recipe, arms["a"])
    gpu_memory.check_gpu_memory(arms["b"], prepared.config, ranks=prepared.ranks, expert_parallel_size=prepared.experts)
    runs: dict[str, list[str]] = {"a": [], "b": []}
    order = alternating(settings.ab_rounds)
    for number, arm in enumerate(order, start=1):
        switched = "all switches" if switch == "all" else switch
        title = f"{prepared.title}, {switched} {ARMS[arm][0]}, run {number} of {len(order)}"
        # Nothing of the trainer is kept, which holds the engine.
        run_dir = fit(
            recipe,
            arms[arm],
            prepared,
            title=title,
            grad_clear_census=switch == "scoped_grad_clear",
            collective_census=switch == "all" or switch.startswith("coalesce_"),
        )[0]
        runs[arm].append(str(run_dir))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    folder = settings.output / f"ab_{switch}_{Path(runs['a'][0]).name}"
    if getattr(rank_zero_only, "rank", 0) == 0:
        _show_and_keep(runs, folder)
    return folder


def alternating(rounds: int) -> str:
    """The arms in their order: each round in the other order than the one before.

    >>> alternating(3)
    'abbaab'
    """
    return "".join("ba" if number % 2 else "ab" for number in range(rounds))


def why_the_same(settings: Settings) -> str | None:
    """Why the switch of ``--ab`` makes no difference under these settings and this DeepSpeed; None where it does.

    Args:
        settings: The run's.
    """
    from deepspeed import __version__
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    switch = str(settings.ab)
    left_out = parts_to_leave_out(DeepSpeedZeroOptimizer_Stage3)
    if switch in left_out:
        missing = left_out[switch]
        if missing is not None:
            return f"DeepSpeed {__version__} lacks what this part needs ({missing}), so it is left out."
        fix = next(fix for fix in UPSTREAM_FIXES if fix.name == switch)
        return (
            f"DeepSpeed {__version__} does this by itself. In {fix.affected}, {fix.symbol.rpartition('.')[2]} "
            f"{fix.reason}: compare with one of these."
        )
    if switch == "scoped_grad_clear" and settings.batch_optimizer_step:
        return "The merged step clears once by itself; add --batch_optimizer_step false."
    if switch == "alias_master_weights" and settings.precision != "32-true" and not settings.bf16_masters:
        return (
            f"With --precision {settings.precision} masters are fp32 and weights bf16, so they can't be shared; add "
            "--bf16_masters true, or take --precision 32-true."
        )
    return None


def _show_and_keep(runs: dict[str, list[str]], folder: Path) -> None:
    a, b = ([read_run(path) for path in runs[arm]] for arm in "ab")
    report = assemble(a, b)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(report, allow_nan=False, indent=1) + "\n")
    (folder / "comparison.md").write_text(markdown(report) + "\n")
    draw(report, a, b, folder / "comparison.png")
    show(report)
    sides = (" ".join([f"--{arm}", *map(quote, runs[arm])]) for arm in "ab")
    print(f"Kept: {folder}/comparison.json, .md, .png. Again: lightning-zero3 compare {' '.join(sides)}")
