# SPDX-License-Identifier: Apache-2.0
"""Of any config, and any arguments: what is changed, what stays, what stock writes."""

import copy
from typing import Any

from hypothesis import given, settings
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zero3.config import ConfigConflictError, Zero3Options
from lightning_zero3.ds_config import (
    complete,
    inference_config,
)
from tests.ds_configs import (
    OPTIONS,
    OPTIONS_DRAWN,
    arguments,
    configs,
    leaves,
    scribble,
)


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


@settings(deadline=None)
@given(configs())
def test_the_inference_config_shares_nothing_with_the_training_config(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    scribble(inference_config(config))
    assert config == before
