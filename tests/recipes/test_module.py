"""What all recipes share: the module that is trained, and the Trainer that is built from settings."""

from pathlib import Path
from typing import Any

import glm45air
import lightning.pytorch as pl
import pytest
import torch
from transformers import Glm4MoeForCausalLM

import shared.run
from lightning_zero3.config import SetupError
from shared.module import CausalLanguageModel
from shared.run import Settings, local_processes, train


def module(**options: Any) -> CausalLanguageModel:
    made = CausalLanguageModel(Glm4MoeForCausalLM, glm45air.tiny_config(), **{"learning_rate": 0.01, **options})
    made.configure_model()
    return made


def test_recomputation_is_on_where_it_is_asked_for():
    assert not module().model.is_gradient_checkpointing
    assert module(recompute_activations=True).model.is_gradient_checkpointing


def test_the_seed_decides_the_weights():
    first, same, other = (module(seed=seed).model.lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_learning_rate_warms_up_to_what_was_asked_for():
    made = module(learning_rate=0.5, warmup_steps=4).configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    assert made["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.05)
    assert rates == sorted(rates)
    assert rates[4] == rates[5] == pytest.approx(0.5)
    assert module(learning_rate=0.5).configure_optimizers().param_groups[0]["lr"] == 0.5


class Recorded(Exception):
    """Ends ``train`` where it would start a fit."""


def arguments_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Settings, **options: Any) -> dict[str, Any]:
    """What ``train`` hands to Lightning."""
    seen: dict[str, Any] = {}

    class Trainer(pl.Trainer):
        def __init__(self, **arguments: Any) -> None:
            seen.update(arguments)
            super().__init__(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

        def fit(self, module: Any, loader: Any) -> None:
            seen.update(module=module, loader=loader)
            raise Recorded

    monkeypatch.setattr(shared.run.pl, "Trainer", Trainer)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 2000)
    defaults = {
        "model_class": Glm4MoeForCausalLM,
        "config": glm45air.tiny_config(),
        "experts": 8,
        "data": str(text),
        "tokenizer": None,
        "text_field": "text",
        "devices": 2,
        "num_nodes": 1,
        "output": tmp_path / "runs",
        "seed": 0,
        "switches": {"scoped_grad_clear": True, "alias_master_weights": True},
    }
    with pytest.raises(Recorded):
        train("test", settings=settings, **{**defaults, **options})
    return seen


TINY = glm45air.SETTINGS["tiny"]


def test_settings_reach_the_trainer_the_strategy_and_the_module(monkeypatch, tmp_path):
    settings = TINY.with_overrides(
        precision="bf16-mixed", max_steps=7, learning_rate=0.125, recompute_activations=True, micro_batch_size=3
    )
    switches = {"scoped_grad_clear": False, "alias_master_weights": False}
    seen = arguments_of(monkeypatch, tmp_path, settings, num_nodes=4, seed=9, switches=switches)
    assert (seen["precision"], seen["max_steps"], seen["num_nodes"], seen["devices"]) == ("bf16-mixed", 7, 4, 2)
    options = seen["strategy"].options
    assert not options.scoped_grad_clear
    assert not options.alias_master_weights
    # 8 ranks, 8 experts: the largest size that divides both.
    assert options.expert_parallel_size == 8
    made = seen["module"]
    assert (made.learning_rate, made.recompute_activations, made.seed) == (0.125, True, 9)
    assert made.warmup_steps == TINY.warmup_steps > 0
    assert seen["loader"].batch_size == 3
    assert isinstance(seen["loader"].sampler, torch.utils.data.RandomSampler)


def test_the_full_sizes_settings_are_those_of_the_report(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    full = glm45air.SETTINGS["full"]
    assert full.learning_rate == 1e-5
    with pytest.raises(SetupError, match="needs GPUs"):
        arguments_of(monkeypatch, tmp_path, full)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"vocab_size": 100}, TINY, "256 tokens, the model's vocabulary 100"),
        ({"max_position_embeddings": 128}, TINY, "--sequence_length 256: the model has 128 positions"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(monkeypatch, tmp_path, config, settings, message):
    made = glm45air.tiny_config()
    for name, value in config.items():
        setattr(made, name, value)
    with pytest.raises(SetupError, match=message):
        arguments_of(monkeypatch, tmp_path, settings, config=made)


def test_an_output_that_cannot_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file"):
        arguments_of(monkeypatch, tmp_path, TINY, output=tmp_path / "file" / "runs")


def test_processes_are_the_launchers_number_or_two_on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert local_processes() == 2
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert local_processes() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_processes() == 4
