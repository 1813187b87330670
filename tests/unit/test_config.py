# SPDX-License-Identifier: Apache-2.0
"""The options of the strategy: every type and range that is refused, and what the refusal says."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero3.config import ConfigConflictError, Zero3Options


def test_the_defaults_are_all_switches_on_and_no_expert_parallelism() -> None:
    assert dataclasses.asdict(Zero3Options()) == {
        "scoped_grad_clear": True,
        "alias_master_weights": True,
        "coalesce_grad_norms": True,
        "batch_optimizer_step": True,
        "coalesce_persistent_gather": True,
        "skip_redundant_release": True,
        "bucket_per_process_group": True,
        "lean_hooks": True,
        "lean_linear": True,
        "step_bytes_budget": None,
        "expert_parallel_size": None,
        "expert_parallel_preset": None,
        "router_bias_update_speed": None,
        "tensor_parallel_size": None,
        "verify_parallel": False,
        "async_save": False,
        "stock_semantics": False,
        "resume_layout": None,
        "trust_checkpoint": False,
    }


SWITCHES = [name for name, value in dataclasses.asdict(Zero3Options()).items() if value is True]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, None, "false", 1.0])
def test_a_switch_is_a_bool(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r}"):
        Zero3Options(**{name: value})


# A bool is an int in Python; True would otherwise pass for one rank.
@pytest.mark.parametrize("name", ["expert_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize("size", [True, False, "8", 8.0, [8]])
def test_a_size_is_an_int(name: str, size: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}="):
        Zero3Options(**{name: size})


@pytest.mark.parametrize("budget", [True, "1e9", 1e9, [8]])
def test_a_budget_is_an_int(budget: Any) -> None:
    with pytest.raises(TypeError, match="step_bytes_budget="):
        Zero3Options(step_bytes_budget=budget)


@settings(deadline=None)
@given(st.integers())
def test_a_budget_is_1_byte_or_more(budget: int) -> None:
    if budget >= 1:
        assert Zero3Options(step_bytes_budget=budget).step_bytes_budget == budget
    else:
        with pytest.raises(ValueError, match=f"step_bytes_budget={budget}: 1 byte or more"):
            Zero3Options(step_bytes_budget=budget)


@settings(deadline=None)
@given(st.sampled_from(["expert_parallel_size", "tensor_parallel_size"]), st.integers())
def test_a_size_is_1_or_more(name: str, size: int) -> None:
    if size >= 1:
        assert getattr(Zero3Options(**{name: size}), name) == size
    else:
        with pytest.raises(ValueError, match=f"{name}={size}: .*1 or more"):
            Zero3Options(**{name: size})


@pytest.mark.parametrize("speed", [True, "0.001", [0.001]])
def test_a_speed_is_a_number(speed: Any) -> None:
    with pytest.raises(TypeError, match="router_bias_update_speed="):
        Zero3Options(router_bias_update_speed=speed)


@pytest.mark.parametrize("speed", [0, 0.0, -0.001, float("nan"), float("inf")])
def test_a_speed_is_above_0(speed: float) -> None:
    with pytest.raises(ValueError, match=r"router_bias_update_speed=.*above 0"):
        Zero3Options(router_bias_update_speed=speed)


def test_a_speed_is_kept() -> None:
    assert Zero3Options(router_bias_update_speed=1).router_bias_update_speed == 1


@pytest.mark.parametrize("preset", [1, True, ["deepseek_v3"]])
def test_a_preset_is_a_string(preset: Any) -> None:
    with pytest.raises(TypeError, match="expert_parallel_preset="):
        Zero3Options(expert_parallel_size=2, expert_parallel_preset=preset)


def test_a_preset_without_a_size_names_both() -> None:
    with pytest.raises(ValueError, match="expert_parallel_preset='mixtral' without expert_parallel_size"):
        Zero3Options(expert_parallel_preset="mixtral")


def test_a_preset_with_a_size_is_kept() -> None:
    assert Zero3Options(expert_parallel_size=1, expert_parallel_preset="mixtral").expert_parallel_preset == "mixtral"


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Zero3Options().scoped_grad_clear = False  # type: ignore[misc]


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Zero3Options(True)  # type: ignore[misc]


def test_a_conflict_is_a_value_error() -> None:
    # Scripts that catch ValueError for wrong settings (the recipes do) must catch conflicts too.
    assert issubclass(ConfigConflictError, ValueError)


@pytest.mark.parametrize("value", ["Universal", True, 2])
def test_an_unknown_layout(value: Any) -> None:
    with pytest.raises(ValueError, match=r'resume_layout=.*: "universal" to go on'):
        Zero3Options(resume_layout=value)
