"""The join of a user's DeepSpeed config with arguments and options: nothing lost, nothing overruled in silence.

Which argument stands where in a config is asked of Lightning itself, so a wrong path in the tables fails here.
"""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

from lightning_zero3.config import ConfigConflictError, Zero3Options
from lightning_zero3.ds_config import (
    ARGUMENT_PATHS,
    OFFLOAD_ARGUMENT_PATHS,
    check_against_trainer,
    complete,
    expert_parallel_section,
    inference_config,
    settle_trainer_values,
    tensor_parallel_section,
    with_parallel_layers,
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


# --- Expert parallelism ---


def test_without_a_size_the_section_is_the_users() -> None:
    assert "expert_parallel" not in complete({}, {}, OPTIONS)
    theirs = {"enabled": True, "autoep_size": 4, "preset_model": "mixtral", "load_balance_coeff": None}
    assert complete({"expert_parallel": theirs}, {}, OPTIONS)["expert_parallel"] == theirs


def test_a_size_makes_the_section() -> None:
    assert complete({}, {}, Zero3Options(expert_parallel_size=4))["expert_parallel"] == {
        "enabled": True,
        "autoep_size": 4,
    }


@pytest.mark.parametrize("theirs", [{}, {"preset_model": None}, {"preset_model": "deepseek_v3"}], ids=repr)
def test_a_preset_is_filled_in(theirs: dict[str, Any]) -> None:
    options = Zero3Options(expert_parallel_size=1, expert_parallel_preset="deepseek_v3")
    assert complete({"expert_parallel": theirs}, {}, options)["expert_parallel"]["preset_model"] == "deepseek_v3"


def test_a_preset_in_the_config_stays_where_no_option_is_given() -> None:
    options = Zero3Options(expert_parallel_size=1)
    theirs = {"preset_model": "mixtral", "load_balance_coeff": None}
    assert complete({"expert_parallel": theirs}, {}, options)["expert_parallel"] == {
        "enabled": True,
        "autoep_size": 1,
        **theirs,
    }


@pytest.mark.parametrize(
    ("theirs", "option", "entry"),
    [
        ({"autoep_size": 2}, "expert_parallel_size=4", "expert_parallel.autoep_size to 2"),
        ({"enabled": False}, "expert_parallel_size=4", "expert_parallel.enabled to False"),
        (
            {"preset_model": "mixtral"},
            "expert_parallel_preset='deepseek_v3'",
            "expert_parallel.preset_model to 'mixtral'",
        ),
    ],
)
def test_a_conflict_about_expert_parallelism_names_both(theirs: dict[str, Any], option: str, entry: str) -> None:
    options = Zero3Options(expert_parallel_size=4, expert_parallel_preset="deepseek_v3")
    with pytest.raises(ConfigConflictError) as caught:
        complete({"expert_parallel": theirs}, {}, options)
    assert option in str(caught.value)
    assert entry in str(caught.value)


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({}, False),
        ({"expert_parallel": {}}, False),
        ({"expert_parallel": {"autoep_size": 4}}, False),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, False),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, True),
    ],
    ids=repr,
)
def test_the_section_counts_only_where_it_is_enabled(config: dict[str, Any], on: bool) -> None:
    assert expert_parallel_section(config) == (config["expert_parallel"] if on else None)


# --- Any config, any arguments ---


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


@settings(deadline=None)
@given(configs(), arguments(), OPTIONS_DRAWN)
def test_neither_the_users_dict_nor_the_arguments_are_changed(
    base: dict[str, Any], given_arguments: dict[str, Any], options: Zero3Options
) -> None:
    base_before, arguments_before = copy.deepcopy(base), copy.deepcopy(given_arguments)
    try:
        completed = complete(base, given_arguments, options)
    except ConfigConflictError:
        pass
    else:
        scribble(completed)  # a section that both shared would show it
    assert base == base_before
    assert given_arguments == arguments_before


@settings(deadline=None)
@given(configs(), arguments(), OPTIONS_DRAWN)
def test_what_the_users_dict_says_stays_unless_it_is_refused(
    base: dict[str, Any], given_arguments: dict[str, Any], options: Zero3Options
) -> None:
    try:
        completed = leaves(complete(base, given_arguments, options))
    except ConfigConflictError:
        return
    for path, value in leaves(base).items():
        assert value == "auto" or completed[path] == value, path


@settings(deadline=None)
@given(configs(), arguments(), OPTIONS_DRAWN)
def test_completing_twice_is_completing_once(
    base: dict[str, Any], given_arguments: dict[str, Any], options: Zero3Options
) -> None:
    try:
        once = complete(base, given_arguments, options)
    except ConfigConflictError:
        return
    assert complete(once, given_arguments, options) == once


@settings(deadline=None)
@given(arguments())
def test_arguments_beside_a_bare_config_give_what_stock_lightning_writes(given_arguments: dict[str, Any]) -> None:
    requests = {name: given_arguments.pop(name, False) for name in ("offload_optimizer", "offload_parameters")}
    stock = DeepSpeedStrategy(stage=3, **requests, **given_arguments).config
    completed = leaves(complete({}, {**requests, **given_arguments}, OPTIONS))
    stocks = leaves(stock)
    del completed[("zero_optimization", "stage")]
    completed.pop(("zero_force_ds_cpu_optimizer",), None)
    if given_arguments.get("logging_batch_size_per_gpu") == "auto":
        del completed[("train_micro_batch_size_per_gpu",)]  # Lightning leaves "auto" out
    assert completed.items() <= stocks.items()


# --- Against the Trainer ---


def test_a_real_trainer_has_the_attributes_that_are_read() -> None:
    real = pl.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    agreeing = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    check_against_trainer(agreeing, trainer=real, world_size=1, precision=real.precision)
    for differing in ({"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.5}):
        with pytest.raises(ConfigConflictError):
            check_against_trainer(differing, trainer=real, world_size=1, precision=real.precision)


@BARE
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bare_config_agrees_with_any_trainer(bare: dict[str, Any], precision: str) -> None:
    check(
        complete(bare, {}, OPTIONS),
        precision=precision,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
    )


@pytest.mark.parametrize("where", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")])
@pytest.mark.parametrize("fast_init", [True, False])
def test_masters_are_not_read_from_swapped_weights(where: tuple[str, str], fast_init: bool) -> None:
    optimizer, parameters = where
    zero = {"offload_optimizer": {"device": optimizer, "fast_init": fast_init}, "offload_param": {"device": parameters}}
    refused = fast_init and where == ("nvme", "nvme")
    with pytest.raises(ConfigConflictError, match="Leave fast_init out") if refused else nullcontext():
        check({"zero_optimization": zero})


@pytest.mark.parametrize(("theirs", "trainers"), [(4, 4), (1, 1), ("auto", 4), (None, 4)])
def test_accumulation_that_agrees_passes(theirs: Any, trainers: int) -> None:
    check({"gradient_accumulation_steps": theirs}, accumulate_grad_batches=trainers)


@pytest.mark.parametrize(("theirs", "trainers"), [(4, 1), (1, 8)])
def test_accumulation_that_differs_names_both_and_what_to_pass(theirs: int, trainers: int) -> None:
    with pytest.raises(ConfigConflictError) as caught:
        check({"gradient_accumulation_steps": theirs}, accumulate_grad_batches=trainers)
    assert f"gradient_accumulation_steps to {theirs}" in str(caught.value)
    assert f"accumulates {trainers}" in str(caught.value)
    assert f"Trainer(accumulate_grad_batches={theirs})" in str(caught.value)


@pytest.mark.parametrize(("theirs", "trainers"), [(1.0, 1.0), (1.0, None), (None, 1.0), ("auto", 1.0), (1, 1.0)])
def test_clipping_that_agrees_passes(theirs: Any, trainers: float | None) -> None:
    check({"gradient_clipping": theirs}, gradient_clip_val=trainers)


def test_clipping_that_differs_names_both() -> None:
    with pytest.raises(ConfigConflictError, match=r"gradient_clipping to 1\.0.*gradient_clip_val=0\.5"):
        check({"gradient_clipping": 1.0}, gradient_clip_val=0.5)
    with pytest.raises(ConfigConflictError, match=r"gradient_clipping to 1\.0.*gradient_clip_val=0"):
        check({"gradient_clipping": 1.0}, gradient_clip_val=0)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 64))
def test_a_total_batch_size_is_the_product_or_refused_with_the_parts(
    micro: int, accumulate: int, ranks: int, total: int
) -> None:
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}
    if total == micro * accumulate * ranks:
        check(config, accumulate_grad_batches=accumulate, world_size=ranks)
        return
    with pytest.raises(ConfigConflictError) as caught:
        check(config, accumulate_grad_batches=accumulate, world_size=ranks)
    for part in (
        f"train_batch_size to {total}",
        f"train_micro_batch_size_per_gpu {micro}",
        f"accumulate_grad_batches {accumulate}",
        f"{ranks} ranks",
        f"is {micro * accumulate * ranks}",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 7},
        {"train_micro_batch_size_per_gpu": 7},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 7},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": "auto"},
    ],
    ids=repr,
)
def test_one_batch_size_alone_is_no_conflict(config: dict[str, Any]) -> None:
    check(config, accumulate_grad_batches=4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_16_bit_section_agrees_with_its_own_precision_only(precision: str, section: str, enabled: bool) -> None:
    config = {section: {"enabled": enabled}}
    if enabled == (precision in SIXTEEN_BITS[section]):
        check(config, precision=precision)
        return
    with pytest.raises(ConfigConflictError) as caught:
        check(config, precision=precision)
    assert f'precision="{precision}"' in str(caught.value)
    assert section in str(caught.value)
    if enabled:
        advised = re.findall(r'Pass Trainer\(precision="([\w-]+)"\)', str(caught.value))
        assert len(advised) == 1
        check(config, precision=advised[0])  # the advice works


@pytest.mark.parametrize("precision", PRECISIONS)
def test_torch_autocast_goes_with_fp32_weights_only(precision: str) -> None:
    check({"torch_autocast": {"enabled": False}}, precision=precision)
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    if precision == "32-true":
        check(config, precision=precision)
        return
    with pytest.raises(ConfigConflictError) as caught:
        check(config, precision=precision)
    assert "torch_autocast" in str(caught.value)
    assert f'precision="{precision}"' in str(caught.value)
    assert 'Trainer(precision="32-true")' in str(caught.value)


@settings(deadline=None)
@given(configs(), st.sampled_from(PRECISIONS), st.sampled_from([1, 4]))
def test_checking_changes_nothing(config: dict[str, Any], precision: str, accumulate: int) -> None:
    before = copy.deepcopy(config)
    try:
        check(config, precision=precision, accumulate_grad_batches=accumulate)
    except ConfigConflictError as conflict:
        assert "Trainer" in str(conflict)  # noqa: PT017 (a conflict is one of two good outcomes)
    assert config == before


def test_values_that_lightning_fills_in_are_settled() -> None:
    config: dict[str, Any] = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3},
    }
    settle_trainer_values(config)
    assert config == {"zero_optimization": {"stage": 3}}


def test_numbers_of_the_users_own_are_not_settled_away() -> None:
    config: dict[str, Any] = {
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
        "steps_per_print": 10,
    }
    before = dict(config)
    settle_trainer_values(config)
    assert config == before


def test_lightning_accepts_a_settled_config() -> None:
    module = pl.LightningModule()
    module.trainer = SimpleNamespace(  # type: ignore[assignment]
        accumulate_grad_batches=4, gradient_clip_val=0.5, fit_loop=SimpleNamespace(_data_source=None)
    )
    config: dict[str, Any] = {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}
    strategy = DeepSpeedStrategy(config=config)
    strategy._lightning_module = module
    settle_trainer_values(config)
    strategy._format_batch_size_and_grad_accum_config()
    assert config == {
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
    }


# --- Inference ---


@BARE
def test_inference_needs_nothing_but_a_bare_config(bare: dict[str, Any]) -> None:
    # Stock Lightning raises a KeyError here: it reads zero_allow_untested_optimizer without asking.
    assert inference_config(bare) == {"train_micro_batch_size_per_gpu": 1, **bare}


def test_inference_keeps_what_decides_how_weights_are_held_and_computed() -> None:
    kept = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    training_only = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR"},
        "wall_clock_breakdown": True,
    }
    assert inference_config({**training_only, **kept}) == {"train_micro_batch_size_per_gpu": 1, **kept}


@settings(deadline=None)
@given(configs())
def test_the_inference_config_shares_nothing_with_the_training_config(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    scribble(inference_config(config))
    assert config == before


# --- Tensor parallelism ---


def test_a_tensor_parallel_size_is_autotps() -> None:
    config = complete({}, {}, Zero3Options(tensor_parallel_size=4))
    assert config["tensor_parallel"] == {"autotp_size": 4}
    assert tensor_parallel_section(config) == {"autotp_size": 4}
    for one in (complete({}, {}, Zero3Options(tensor_parallel_size=1)), complete({}, {}, OPTIONS)):
        assert tensor_parallel_section(one) is None


def test_two_tensor_parallel_sizes_are_a_conflict() -> None:
    with pytest.raises(ConfigConflictError, match=r"tensor_parallel_size=4, but .* tensor_parallel.autotp_size to 2"):
        complete({"tensor_parallel": {"autotp_size": 2}}, {}, Zero3Options(tensor_parallel_size=4))


def test_tensor_parallelism_with_whole_expert_sets_is_refused() -> None:
    with pytest.raises(ConfigConflictError, match=r"tensor_parallel_size=2 with expert_parallel_size=1: .*2 or more"):
        complete({}, {}, Zero3Options(tensor_parallel_size=2, expert_parallel_size=1))
    complete({}, {}, Zero3Options(tensor_parallel_size=1, expert_parallel_size=1))


def test_batches_are_counted_once_per_tensor_parallel_group() -> None:
    config = complete({"train_batch_size": 8}, {}, Zero3Options(tensor_parallel_size=2))
    trainer = SimpleNamespace(accumulate_grad_batches=2, gradient_clip_val=None)
    arguments = {"trainer": trainer, "world_size": 4, "precision": "32-true"}
    check_against_trainer(config, **arguments, micro_batch_size=2)
    with pytest.raises(ConfigConflictError, match=r"train_batch_size to 8, .* 4 × .* 2 × 2 data-parallel ranks is 16"):
        check_against_trainer(config, **arguments, micro_batch_size=4)
    # DeepSpeed would count 4 ranks and refuse it.
    settle_trainer_values(config)
    assert "train_batch_size" not in config


def test_what_is_found_out_about_a_model_goes_into_the_sections_and_changes_nothing_else() -> None:
    config = complete({}, {}, Zero3Options(tensor_parallel_size=2, expert_parallel_size=2))
    before = copy.deepcopy(config)
    found = with_parallel_layers(config, experts={"preset_model": "mixtral"}, partition={"layer_specs": []})
    assert config == before
    assert found["expert_parallel"] == {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    assert found["tensor_parallel"] == {"autotp_size": 2, "partition_config": {"layer_specs": []}}
    assert with_parallel_layers(config) == config
