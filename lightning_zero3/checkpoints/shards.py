# SPDX-License-Identifier: Apache-2.0
"""What a rank's two files of a sharded checkpoint say of themselves, and whether all ranks' files are of one save.

Source of the format: ``DeepSpeedEngine._common_checkpoint_state`` and ``_save_zero_checkpoint``,
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (0.19.7, 0.19.8).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.checkpoints import unpickling
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError

_IN_A_MODEL_FILE = ("module", "param_shapes", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
_COUNTERS = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
_IN_AN_OPTIMIZER_FILE = ("fp32_flat_groups", "loss_scaler", "dynamic_loss_scale", "overflow")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What all files of one save have in common, and how a message calls it.
_IN_COMMON = {
    "global_steps": "steps",
    "global_samples": "samples",
    "skipped_steps": "skipped steps",
    "dp_world_size": "data-parallel ranks",
    "mp_world_size": "model-parallel ranks",
    "ds_version": "versions of DeepSpeed",
    "parameters": "parameters",
    "ds_config": "DeepSpeed configs",
    "optimizer_steps": "optimizer steps",
    "hyperparameters": "hyperparameters",
}


@dataclass(frozen=True)
class Shard:
    """A rank's files, mapped.

    Args:
        model_file: Weights' names, buffers, counters, what Lightning has saved.
        optimizer_file: Masters and the optimizer's states.
        model: The content of the first.
        optimizer: That of the second, below DeepSpeed's own heading.
        version: The version of DeepSpeed that the second names.
        config_digest: Its config's.
    """

    model_file: Path
    optimizer_file: Path
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    version: Any
    config_digest: str


def open_shard(model_file: Path, optimizer_file: Path, *, trust: bool) -> Shard:
    """Read what two files hold, all but the tensors' values.

    Args:
        model_file: The one with the weights' names.
        optimizer_file: The one with masters and states.
        trust: Whether anything in them may be run.

    Raises:
        DamagedCheckpointError: One is missing, can't be read, or holds something else.
        UntrustedCheckpointError: One holds something that isn't on the list.
    """
    model = _with(_read(model_file, trust), _IN_A_MODEL_FILE, model_file)
    whole = _with(_read(optimizer_file, trust), ("optimizer_state_dict",), optimizer_file)
    optimizer = _with(whole["optimizer_state_dict"], _IN_AN_OPTIMIZER_FILE, optimizer_file)
    if not hasattr(optimizer["loss_scaler"], "cur_scale"):
        raise DamagedCheckpointError(f"{optimizer_file} isn't such a file of ZeRO stage 3: it has no loss scaler.")
    flats = optimizer["fp32_flat_groups"]
    if not isinstance(flats, list | tuple) or not all(torch.is_tensor(flat) for flat in flats):
        raise DamagedCheckpointError(f"{optimizer_file} is no optimizer file of ZeRO stage 3.")
    for name in _COUNTERS:
        if not isinstance(model[name], int):
            raise DamagedCheckpointError(f"{model_file} isn't such a file of ZeRO stage 3: {name} is {model[name]!r}.")
    if not isinstance(model["param_shapes"], list | tuple):
        raise DamagedCheckpointError(f"{model_file} is no model file of ZeRO stage 3: it names no parameters' shapes.")
    return Shard(model_file, optimizer_file, model, optimizer, whole.get("ds_version"), _digest(whole.get("ds_config")))


def _read(path: Path, trust: bool) -> Any:
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing.{_other_precision(path)}")
    return unpickling.read(path, trust=trust, mapped=True)


def _other_precision(path: Path) -> str:
    """DeepSpeed names optimizer files of bf16 runs by ``bf16_``."""
    bf16 = path.name.startswith("bf16_")
    other = path.with_name(path.name.removeprefix("bf16_") if bf16 else f"bf16_{path.name}")
    if not other.is_file():
        return ""
    return (
        f" There is {other.name}: the run that saved it was {'not ' if bf16 else ''}in bf16, and this one is"
        f"{'' if bf16 else ' not'}. Resume with its precision."
    )


def _with(content: Any, names: Iterable[str], path: Path) -> Mapping[str, Any]:
    lacking = [name for name in names if not isinstance(content, Mapping) or name not in content]
    if lacking:
        raise DamagedCheckpointError(f"{path} isn't such a file of ZeRO stage 3: it lacks {', '.join(lacking)}.")
    found: Mapping[str, Any] = content
    return found


def facts(shard: Shard) -> list[tuple[str, dict[str, Any]]]:
    """What must be alike in the files of all ranks: by file's name, small enough to be sent around.

    Args:
        shard: A rank's files.
    """
    inner = shard.optimizer.get("optimizer_state_dict")
    states = inner.get("state", {}).values() if isinstance(inner, Mapping) else ()
    # FusedAdam counts in the last tensor of a group only.
    steps = [_number(state["step"]) for state in states if isinstance(state, Mapping) and "step" in state]
    groups = inner.get("param_groups", []) if isinstance(inner, Mapping) else []
    # A schedule that follows a metric (ReduceLROnPlateau) gives each rank the learning rate of its own metric.
    own = ("params", "lr")
    hyperparameters = [{name: value for name, value in group.items() if name not in own} for group in groups]
    model = {name: shard.model.get(name) for name in list(_IN_COMMON)[:6]}
    return [
        (
            shard.model_file.name,
            {
                **model,
                "ds_config": _digest(shard.model.get("ds_config")),
                "parameters": _digest([list(group) for group in shard.model["param_shapes"]]),
            },
        ),
        (
            shard.optimizer_file.name,
            {
                "ds_version": shard.version,
                "ds_config": shard.config_digest,
                "optimizer_steps": max(steps) if steps else None,
                "hyperparameters": _digest(hyperparameters),
            },
        ),
    ]


def check_alike(all_facts: Iterable[tuple[str, Mapping[str, Any]]], folder: Path) -> None:
    """Refuse files of different saves that were mixed up.

    Args:
        all_facts: Those of all ranks.
        folder: Where the files are.

    Raises:
        DamagedCheckpointError: Two differ in something that is alike in all files of one save.
    """
    every = list(all_facts)
    for name, called in _IN_COMMON.items():
        seen = [(file, each[name]) for file, each in every if name in each]
        counts = Counter(str(value) for _, value in seen)
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        odd, value = next((file, value) for file, value in seen if str(value) != usual)
        other = next(file for file, value in seen if str(value) == usual)
        raise DamagedCheckpointError(
            f"{folder / odd} isn't of the same save as {other}: different {called}"
            f"{'' if _is_a_digest(value) else f', {value} and {usual}'}. Files of several checkpoints are mixed up."
        )
    _check_optimizer_steps(every, folder)


def _check_optimizer_steps(every: list[tuple[str, Mapping[str, Any]]], folder: Path) -> None:
    """An optimizer can't have taken more steps than its engine; fewer it has where it was begun anew."""
    taken = [each["global_steps"] - each["skipped_steps"] for _, each in every if "global_steps" in each]
    for file, each in every:
        steps = each.get("optimizer_steps")
        if taken and steps is not None and steps > max(taken):
            raise DamagedCheckpointError(
                f"{folder / file} isn't of the same save as the model files: its optimizer has taken {steps:g} steps, "
                f"and they were saved after {max(taken)}. Files of several checkpoints are mixed up."
            )


def fewer_optimizer_steps(all_facts: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """What to tell the user where an optimizer has taken fewer steps than its engine; None where it hasn't.

    Args:
        all_facts: Those of all ranks.
    """
    every = list(all_facts)
    taken = [each["global_steps"] - each["skipped_steps"] for _, each in every if "global_steps" in each]
    for file, each in every:
        steps = each.get("optimizer_steps")
        if taken and steps is not None and steps < min(taken):
            return (
                f"{file} holds an optimizer that has taken {steps:g} steps, and the model files were saved after "
                f"{min(taken)}: either it was begun anew on the way, or files of two checkpoints are mixed up."
            )
    return None


def _number(value: Any) -> float:
    return float(value.max()) if torch.is_tensor(value) and value.numel() else float(value)


def _digest(value: Any) -> str:
    # Without addresses of objects, which are each process's own.
    return "digest " + hashlib.sha256(_ADDRESS.sub("", repr(value)).encode()).hexdigest()[:16]


def _is_a_digest(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("digest ")
