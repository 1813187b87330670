# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed configs for tests: the paths in them, what stock Lightning writes, and any that a user might have."""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zero3.config import Zero3Options
from lightning_zero3.ds_config import (
    ARGUMENT_PATHS,
    OFFLOAD_ARGUMENT_PATHS,
    check_against_trainer,
)

OPTIONS = Zero3Options()
ALL_PATHS = {**ARGUMENT_PATHS, **OFFLOAD_ARGUMENT_PATHS}
BARE = pytest.mark.parametrize("bare", [{}, {"zero_optimization": {}}, {"zero_optimization": {"stage": 3}}], ids=repr)
PRECISIONS = ("32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true")
SIXTEEN_BITS = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}


def default_of(argument: str) -> Any:
    return inspect.signature(DeepSpeedStrategy.__init__).parameters[argument].default


def other_than(value: Any) -> Any:
    """A value of the same type that differs from ``value``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return 7 if value == "auto" else f"{value}_other"
    return value + 1


def leaves(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Path → value of everything in a config that isn't a section."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found.update(leaves(value, (*above, key)))
        else:
            found[(*above, key)] = value
    return found


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def lightnings_config(**arguments: Any) -> dict[str, Any]:
    """The config that stock Lightning writes for these arguments, its fp16 section included."""
    strategy = DeepSpeedStrategy(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
        precision_plugin=DeepSpeedPrecision("16-mixed"),
        **arguments,
    )
    strategy._init_config_if_needed()
    return strategy.config


def trainer(accumulate_grad_batches: int = 1, gradient_clip_val: float | None = None) -> Any:
    return SimpleNamespace(accumulate_grad_batches=accumulate_grad_batches, gradient_clip_val=gradient_clip_val)


def check(config: Mapping[str, Any], *, world_size: int = 2, precision: str = "32-true", **of_trainer: Any) -> None:
    check_against_trainer(config, trainer=trainer(**of_trainer), world_size=world_size, precision=precision)


def values_of(argument: str) -> st.SearchStrategy[Any]:
    """Values that an argument may have; few, so that two draws often agree."""
    default = default_of(argument)
    return st.sampled_from(["cpu", "nvme"] if argument.endswith("_device") else [default, other_than(default)])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "zero_optimization": st.fixed_dictionaries({}, optional={"stage": st.sampled_from([3, 3, 3, 2])}),
                "fp16": st.just({"enabled": True}),
                "expert_parallel": st.fixed_dictionaries(
                    {}, optional={"enabled": st.booleans(), "autoep_size": st.sampled_from([1, 2])}
                ),
                "torch_autocast": st.just({"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}),
                "gradient_accumulation_steps": st.sampled_from([1, 4, "auto"]),
                "optimizer": st.just({"type": "AdamW", "params": {"betas": [0.9, 0.95]}}),
            },
        )
    )
    for argument in draw(st.sets(st.sampled_from(sorted(ALL_PATHS)), max_size=6)):
        for path in ALL_PATHS[argument]:
            section = config
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = draw(values_of(argument))
    return config


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.sets(st.sampled_from(sorted(ALL_PATHS)), max_size=6))
    offloads = draw(
        st.dictionaries(st.sampled_from(["offload_optimizer", "offload_parameters"]), st.booleans(), max_size=2)
    )
    return {**offloads, **{argument: draw(values_of(argument)) for argument in sorted(chosen)}}


OPTIONS_DRAWN = st.builds(Zero3Options, expert_parallel_size=st.sampled_from([None, None, 1, 2]))


def scribble(section: dict[str, Any]) -> None:
    """Change everything in a config that can be changed in place."""
    for value in section.values():
        if isinstance(value, dict):
            scribble(value)
        elif isinstance(value, list):
            value.append("scribbled")
    section["scribbled"] = True
