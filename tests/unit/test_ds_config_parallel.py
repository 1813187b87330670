# SPDX-License-Identifier: Apache-2.0
"""What the sizes of expert and tensor parallelism make of a DeepSpeed config."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero3.config import ConfigConflictError, Zero3Options
from lightning_zero3.ds_config import (
    check_against_trainer,
    complete,
    expert_parallel_section,
    settle_trainer_values,
    tensor_parallel_section,
    with_parallel_layers,
)
from tests.ds_configs import (
    OPTIONS,
)


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
