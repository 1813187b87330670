# SPDX-License-Identifier: Apache-2.0
"""Options: on the command line and in YAML, with defaults by size, and errors that name the nearest option."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import glm45air
import minimax_m3
import pytest
import yaml

from lightning_zero3.config import SetupError, Zero3Options
from shared import recipe
from shared.settings import Settings

parse = glm45air.RECIPE.parse


def written(path: Path, **options: object) -> str:
    path.write_text(yaml.safe_dump(options))
    return str(path)


def test_defaults_are_those_of_the_size():
    assert parse([]) == glm45air.SETTINGS["tiny"]
    assert parse(["--size", "full"]) == glm45air.SETTINGS["full"]
    assert parse(["--size=full", "--max_steps", "3"]).sequence_length == 8192
    assert parse(["--max_steps", "3"]).sequence_length == 256


def test_the_size_may_come_from_a_file_and_later_options_win(tmp_path):
    file = written(tmp_path / "a.yaml", size="full", max_steps=7, output="elsewhere")
    settings = parse(["--config", file])
    assert (settings.size, settings.max_steps, settings.sequence_length) == ("full", 7, 8192)
    assert settings.output == Path("elsewhere")
    assert parse([f"--config={file}", "--max_steps", "8"]).max_steps == 8
    assert parse(["--max_steps", "8", "--config", file]).max_steps == 7
    assert parse(["--config", file, "--size", "tiny"]).sequence_length == 256


def test_every_option_of_the_strategy_is_an_option_of_a_recipe():
    names = {field.name for field in fields(Zero3Options)}
    assert names < {field.name for field in fields(Settings)}
    assert not parse(["--coalesce_grad_norms", "false"]).coalesce_grad_norms
    assert parse(["--router_bias_update_speed", "1e-3"]).router_bias_update_speed == 0.001
    assert minimax_m3.RECIPE.parse(["--size", "full", "--tensor_parallel_size", "null"]).tensor_parallel_size is None


def test_a_switch_alone_is_on():
    assert parse(["--benchmark"]).steps == 10
    assert parse(["--benchmark", "--max_steps", "50"]).benchmark
    assert not parse(["--benchmark", "false"]).benchmark
    assert parse(["--max_steps", "50"]).steps == 50


def test_steps_to_profile(tmp_path):
    assert parse([]).profiled_steps is None
    assert parse(["--profile", "5"]).profiled_steps == (5, 5)
    assert parse(["--profile", "5-12", "--profile_memory"]).profiled_steps == (5, 12)
    assert parse(["--config", written(tmp_path / "a.yaml", profile="5-6")]).profiled_steps == (5, 6)


def test_print_config_prints_what_a_file_may_hold(tmp_path, capsys):
    arguments = ["--size", "full", "--layers", "3", "--stock_semantics", "true", "--learning_rate", "2e-5"]
    with pytest.raises(SystemExit) as ended:
        parse([*arguments, "--print_config"])
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert set(yaml.safe_load(file.read_text())) == {field.name for field in fields(Settings)}
    assert parse(["--config", str(file)]) == parse(arguments)


def test_help_says_what_each_option_does_and_the_sizes_default(capsys):
    with pytest.raises(SystemExit):
        parse(["--size", "full", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(Settings):
        found = text.split(f" --{field.name} ")[-1]
        assert len(found.split("(type:")[0].split()) > 2, field.name
    assert "Tokens of one sample. (type: int, default: 8192)" in text
    # Docstrings' own marks, and Python's name of what null is here.
    assert "`" not in text
    assert "null and 1 leave layers whole" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expert_paralel_size", "2"], "no option --expert_paralel_size. Did you mean --expert_parallel_size"),
        (["--max_step", "2"], "Did you mean --max_steps"),  # no silent abbreviation
        (["--max-steps", "2"], "Did you mean --max_steps"),
        (["-max_steps", "2"], "options begin with two dashes"),
        (["--size", "huge"], "--size huge: one of tiny, full"),
        (["--max_steps", "many"], "max_steps"),
        (["--max_steps", "0"], "--max_steps 0: 1 or more"),
        (["--micro_batch_size", "-1"], "--micro_batch_size -1"),
        (["--learning_rate=-1e-3"], "--learning_rate -0.001: 0 or more"),
        (["--learning_rate", ".nan"], "--learning_rate nan: 0 or more"),
        (["--weight_decay", ".inf"], "--weight_decay inf: 0 or more"),
        (["--seed", "4294967296"], "--seed 4294967296: at most 4,294,967,295"),
        (["--timeout_seconds", "1000000000000000"], "--timeout_seconds 1000000000000000: at most"),
        (["--sequence_length", "1"], "--sequence_length 1"),
        (["--loss_tiles", "300"], "--loss_tiles 300: a sample has 256 tokens"),
        (["--bf16_masters", "true"], "--precision bf16-mixed"),
        (["--attention", "flash"], "attention"),
        (["--profile", "5-"], "--profile 5-: a step or a range of steps, such as 5 or 5-6, of this run's 200."),
        (["--profile", "6-5"], "--profile 6-5: a step or a range"),
        (["--profile", "0"], "--profile 0: a step or a range"),
        (["--profile", "9-11", "--benchmark"], "of this run's 10."),
        (["--profile_memory"], "add --profile 5-6"),
        (["--profile", "5", "--ab", "batch_optimizer_step"], "--profile 5 with --ab batch_optimizer_step"),
        (["--tensor_parallel_size", "0"], "tensor_parallel_size=0"),
        (["--config", "no/such.yaml"], "no/such.yaml: No such file"),
    ],
)
def test_what_is_misspelt_or_impossible_is_named(arguments, message):
    with pytest.raises(SetupError) as refused:
        parse(arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stepz: 3", "Did you mean --max_steps"),
        ("- max_steps", "a YAML file of options"),
        ("a: [", "isn't YAML"),
        ("max_steps: many", "max_steps"),
    ],
)
def test_a_file_is_held_to_the_same(tmp_path, text, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(SetupError) as refused:
        parse(["--config", str(file)])
    assert message in str(refused.value)


def test_a_run_without_the_packages_that_recipes_need_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(recipe, "_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(SystemExit) as ended:
        glm45air.RECIPE.main(["--output", str(tmp_path / "runs")])
    assert ended.value.code == 1
    assert "Recipes need no_such_package: pip install 'lightning_zero3[recipes]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
