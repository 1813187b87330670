# SPDX-License-Identifier: Apache-2.0
"""The join of a user's DeepSpeed config with arguments and options: nothing lost, nothing overruled in silence.

Which argument stands where in a config is asked of Lightning itself, so a wrong path in the tables fails here.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

from lightning_zero3.config import ConfigConflictError
from lightning_zero3.ds_config import (
    ARGUMENT_PATHS,
    OFFLOAD_ARGUMENT_PATHS,
    complete,
)
from tests.ds_configs import (
    ALL_PATHS,
    BARE,
    OPTIONS,
    default_of,
    leaves,
    lightnings_config,
    nested,
    other_than,
)

# --- The tables of paths, against Lightning and DeepSpeed ---


@pytest.fixture
def deepspeed_log_level() -> Iterator[None]:
    """DeepSpeedStrategy sets the level of DeepSpeed's logger; put it back."""
    from deepspeed.utils.logging import logger

    level = logger.level
    yield
    logger.setLevel(level)


def test_paths_are_exactly_what_lightning_changes_for_each_argument(deepspeed_log_level: None) -> None:
    # All of its arguments, so that one without a path in our tables (which would be dropped in silence) fails as well.
    asked_for_here = {"stage", "zero_optimization", "offload_optimizer", "offload_parameters"}
    before = leaves(lightnings_config())
    changed: dict[str, set[tuple[str, ...]]] = {}
    for argument, parameter in inspect.signature(DeepSpeedStrategy.__init__).parameters.items():
        if argument in asked_for_here or not isinstance(parameter.default, bool | int | float | str):
            continue
        after = leaves(lightnings_config(**{argument: other_than(parameter.default)}))
        differing = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        if differing:
            changed[argument] = differing
    assert changed == {argument: set(paths) for argument, paths in ALL_PATHS.items()}


def test_paths_below_zero_optimization_are_fields_of_deepspeeds_own_config() -> None:
    # DeepSpeed forbids unknown fields there: a wrong name would stop the run.
    from deepspeed.runtime.zero.config import get_zero_config

    arguments = {
        argument: "nvme" if argument.endswith("_device") else other_than(default_of(argument)) for argument in ALL_PATHS
    }
    config = complete({}, {"offload_optimizer": True, "offload_parameters": True, **arguments}, OPTIONS)
    zero = get_zero_config(config)
    for argument, paths in ALL_PATHS.items():
        for path in paths:
            if path[0] == "zero_optimization":
                found: Any = zero
                for key in path[1:]:
                    found = getattr(found, key)
                assert str(getattr(found, "value", found)) == str(arguments[argument]), path


def test_no_argument_is_in_both_tables() -> None:
    assert not ARGUMENT_PATHS.keys() & OFFLOAD_ARGUMENT_PATHS.keys()


# --- Bare configs and the stage ---


@BARE
def test_a_bare_config_is_completed(bare: dict[str, Any]) -> None:
    assert complete(bare, {}, OPTIONS) == {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}


def test_a_users_own_choice_about_untested_optimizers_stays() -> None:
    assert complete({"zero_allow_untested_optimizer": False}, {}, OPTIONS)["zero_allow_untested_optimizer"] is False


@pytest.mark.parametrize("stage", [1, 2])
def test_another_stage_is_refused_with_the_strategy_that_has_it(stage: int) -> None:
    with pytest.raises(ConfigConflictError, match=f"zero3_fast .*zero_optimization.stage to {stage}") as caught:
        complete({"zero_optimization": {"stage": stage}}, {}, OPTIONS)
    (named,) = re.findall(r'Trainer\(strategy="(\w+)"\)', str(caught.value))
    assert named in StrategyRegistry.available_strategies()


@pytest.mark.parametrize("stage", [0, "auto"])
def test_no_strategy_is_advised_that_does_not_exist(stage: Any) -> None:
    with pytest.raises(ConfigConflictError, match=f"zero_optimization.stage to {stage}") as caught:
        complete({"zero_optimization": {"stage": stage}}, {}, OPTIONS)
    for named in re.findall(r'Trainer\(strategy="(\w+)"\)', str(caught.value)):
        assert named in StrategyRegistry.available_strategies()


@pytest.mark.parametrize(
    "section",
    ["zero_optimization", "activation_checkpointing", "aio", "fp16", "bf16", "expert_parallel", "torch_autocast"],
)
@pytest.mark.parametrize("value", [True, None, "auto", [1]], ids=repr)
def test_a_section_that_is_no_dict_is_named_with_its_value(section: str, value: Any) -> None:
    with pytest.raises(ConfigConflictError, match=re.escape(f"{section!r} is {value!r}: a dict")):
        complete({section: value}, {}, OPTIONS)


def test_sections_that_this_package_knows_nothing_of_pass_through() -> None:
    theirs = {"comms_logger": {"enabled": True}, "wall_clock_breakdown": True, "zero_optimization": {"zpp": [1, {}]}}
    completed = complete(theirs, {}, OPTIONS)
    assert completed["comms_logger"] == {"enabled": True}
    assert completed["wall_clock_breakdown"] is True
    assert completed["zero_optimization"] == {"stage": 3, "zpp": [1, {}]}


# --- Arguments ---

ONE_PATH_EACH = pytest.mark.parametrize(
    ("argument", "path"), [(argument, path) for argument, paths in ALL_PATHS.items() for path in paths]
)


def base_around(path: tuple[str, ...], entries: Mapping[str, Any]) -> dict[str, Any]:
    """A config in which the section at the end of ``path`` exists and holds ``entries``."""
    if path[1:2] in (("offload_optimizer",), ("offload_param",)):
        entries = {"device": "cpu", **entries}
    return nested(path[:-1], dict(entries))


# An offload section without a device is one that is off; see below for what fills in devices.
@pytest.mark.parametrize(
    ("argument", "path"),
    [(argument, path) for argument, paths in ALL_PATHS.items() for path in paths if path[-1] != "device"],
)
def test_an_argument_fills_in_what_the_config_leaves_out(argument: str, path: tuple[str, ...]) -> None:
    value = other_than(default_of(argument))
    assert leaves(complete(base_around(path, {}), {argument: value}, OPTIONS))[path] == value


@ONE_PATH_EACH
def test_a_config_and_an_argument_that_differ_are_both_named(argument: str, path: tuple[str, ...]) -> None:
    ours = other_than(default_of(argument))
    # "auto" in a config means that nobody has decided yet.
    theirs = default_of(argument) if default_of(argument) != "auto" else 3
    with pytest.raises(ConfigConflictError) as caught:
        complete(base_around(path, {path[-1]: theirs}), {argument: ours}, OPTIONS)
    assert str(caught.value).startswith(f"{argument}={ours!r}, ")
    assert f"{'.'.join(path)} to {theirs!r}" in str(caught.value)
    assert "Leave one of them out" in str(caught.value)


@ONE_PATH_EACH
def test_a_config_and_an_argument_that_agree_are_no_conflict(argument: str, path: tuple[str, ...]) -> None:
    value = other_than(default_of(argument))
    base = base_around(path, {path[-1]: value})
    assert leaves(complete(base, {argument: value}, OPTIONS))[path] == value


def test_an_argument_makes_the_section_that_it_stands_in() -> None:
    completed = complete({}, {"partition_activations": True, "block_size": 4096}, OPTIONS)
    assert completed["activation_checkpointing"] == {"partition_activations": True}
    assert completed["aio"] == {"block_size": 4096}


def test_arguments_about_fp16_make_no_fp16_section() -> None:
    # Its mere presence would keep Lightning from writing one that is enabled.
    assert "fp16" not in complete({}, {"loss_scale": 128.0, "hysteresis": 3}, OPTIONS)


def test_arguments_that_stand_nowhere_in_a_config_are_left_to_lightning() -> None:
    assert complete({}, {"remote_device": "cpu", "load_full_weights": True}, OPTIONS) == complete({}, {}, OPTIONS)


# --- Offloading ---

DEVICES = {"offload_optimizer": "offload_optimizer_device", "offload_parameters": "offload_params_device"}
OFFLOADS = pytest.mark.parametrize(
    ("argument", "section"), [("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")]
)


@OFFLOADS
@BARE
def test_an_offload_argument_makes_its_section_on_the_cpu(argument: str, section: str, bare: dict[str, Any]) -> None:
    assert complete(bare, {argument: True}, OPTIONS)["zero_optimization"] == {"stage": 3, section: {"device": "cpu"}}


@OFFLOADS
@BARE
def test_an_offload_argument_that_is_false_changes_nothing(argument: str, section: str, bare: dict[str, Any]) -> None:
    assert complete(bare, {argument: False}, OPTIONS) == complete(bare, {}, OPTIONS)


@OFFLOADS
def test_an_offload_section_that_is_there_stays_as_it_is(argument: str, section: str) -> None:
    theirs = {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True}
    completed = complete({"zero_optimization": {section: theirs}}, {argument: True}, OPTIONS)
    assert completed["zero_optimization"][section] == theirs


@OFFLOADS
@pytest.mark.parametrize(
    ("wanted", "theirs"), [(False, {"device": "cpu"}), (True, {"device": "none"}), (True, {})], ids=repr
)
def test_an_offload_that_is_asked_for_and_switched_off_is_a_conflict(
    argument: str, section: str, wanted: bool, theirs: dict[str, Any]
) -> None:
    with pytest.raises(ConfigConflictError) as caught:
        complete({"zero_optimization": {section: theirs}}, {argument: wanted}, OPTIONS)
    assert f"{argument}={wanted}" in str(caught.value)
    assert f"zero_optimization.{section}={theirs!r}" in str(caught.value)


@OFFLOADS
@pytest.mark.parametrize("theirs", [{"device": "none"}, {}], ids=repr)
def test_an_offload_that_is_off_on_both_sides_is_no_conflict(
    argument: str, section: str, theirs: dict[str, Any]
) -> None:
    completed = complete({"zero_optimization": {section: theirs}}, {argument: False}, OPTIONS)
    assert completed["zero_optimization"][section] == theirs


@pytest.mark.parametrize(
    ("asked", "details", "section"),
    [
        (
            "offload_optimizer",
            {"offload_optimizer_device": "nvme", "nvme_path": "/fast", "optimizer_buffer_count": 9, "pin_memory": True},
            {"device": "nvme", "nvme_path": "/fast", "buffer_count": 9, "pin_memory": True},
        ),
        (
            "offload_parameters",
            {"offload_params_device": "nvme", "nvme_path": "/fast", "params_buffer_count": 9, "max_in_cpu": 5},
            {"device": "nvme", "nvme_path": "/fast", "buffer_count": 9, "max_in_cpu": 5},
        ),
    ],
)
def test_details_of_an_offload_that_is_asked_for_go_into_its_section(
    asked: str, details: dict[str, Any], section: dict[str, Any]
) -> None:
    zero = complete({}, {asked: True, **details}, OPTIONS)["zero_optimization"]
    assert [value for name, value in zero.items() if name != "stage"] == [section]


@pytest.mark.parametrize("argument", OFFLOAD_ARGUMENT_PATHS)
def test_a_detail_of_an_offload_that_nobody_asks_for_is_dropped(argument: str) -> None:
    value = other_than(default_of(argument))
    assert complete({}, {argument: value}, OPTIONS) == complete({}, {}, OPTIONS)


@OFFLOADS
def test_a_device_in_the_users_section_is_not_overruled_by_one_among_the_arguments(argument: str, section: str) -> None:
    device = DEVICES[argument]
    with pytest.raises(ConfigConflictError, match=device):
        complete({"zero_optimization": {section: {"device": "cpu"}}}, {argument: True, device: "nvme"}, OPTIONS)


@OFFLOADS
def test_an_offload_that_is_refused_is_not_switched_on_by_its_device(argument: str, section: str) -> None:
    base = {"zero_optimization": {section: {"pin_memory": True}}}
    try:
        completed = complete(base, {argument: False, DEVICES[argument]: "cpu"}, OPTIONS)
    except ConfigConflictError:
        return
    assert completed["zero_optimization"][section].get("device", "none") == "none"


@OFFLOADS
@pytest.mark.parametrize("detail", [{}, {"pin_memory": True}], ids=repr)
def test_an_offload_section_that_is_no_dict_is_named_with_its_value(
    argument: str, section: str, detail: dict[str, Any]
) -> None:
    with pytest.raises(ConfigConflictError, match=f"{section}.*'cpu'"):
        complete({"zero_optimization": {section: "cpu"}}, {argument: True, **detail}, OPTIONS)


def test_any_optimizer_may_be_offloaded_unless_the_user_says_otherwise() -> None:
    assert "zero_force_ds_cpu_optimizer" not in complete({}, {"offload_parameters": True}, OPTIONS)
    assert complete({}, {"offload_optimizer": True}, OPTIONS)["zero_force_ds_cpu_optimizer"] is False
    section = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert complete(section, {}, OPTIONS)["zero_force_ds_cpu_optimizer"] is False
    strict = {**section, "zero_force_ds_cpu_optimizer": True}
    assert complete(strict, {}, OPTIONS)["zero_force_ds_cpu_optimizer"] is True
