# SPDX-License-Identifier: Apache-2.0
"""What all recipes share: the module that is trained, and the Trainer that is built from settings."""

from pathlib import Path
from typing import Any

import glm45air
import lightning.pytorch as pl
import minimax_m3
import pytest
import qwen35
import torch
from transformers import Glm4MoeForCausalLM

import shared.attention
import shared.run
from lightning_zero3.config import SetupError
from shared.attention import describe, only_cudnn
from shared.deepspeed_config import deepspeed_config
from shared.module import CausalLanguageModel
from shared.run import train

RECIPE = glm45air.RECIPE


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


def test_weights_come_from_a_folder_less_the_layers_that_are_left_out(tmp_path):
    whole = module(seed=4).model
    whole.save_pretrained(tmp_path)
    layers = RECIPE.configs["tiny"](None).num_hidden_layers
    settings = RECIPE.parse(["--weights", str(tmp_path), "--layers", str(layers - 1)])
    made = shared.run.make_module(RECIPE, RECIPE.config(settings), settings)
    made.configure_model()
    theirs = whole.state_dict()
    assert len(made.model.model.layers) == layers - 1
    assert all(torch.equal(value, theirs[name]) for name, value in made.model.state_dict().items())


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


def arguments_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What ``train`` gives to the Trainer, and to its ``fit``."""
    seen: dict[str, Any] = {}

    class Trainer(pl.Trainer):
        def __init__(self, **arguments: Any) -> None:
            seen.update(arguments)
            super().__init__(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

        def fit(self, module: Any, loader: Any, ckpt_path: Any) -> None:
            seen.update(module=module, loader=loader)
            raise Recorded

    monkeypatch.setattr(shared.run.pl, "Trainer", Trainer)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 2000)
    fixed = ["--data", str(text), "--output", str(tmp_path / "runs"), "--devices", "2"]
    with pytest.raises(Recorded):
        train(RECIPE, RECIPE.parse([*fixed, *arguments]))
    return seen


def test_settings_reach_the_trainer_the_strategy_and_the_module(monkeypatch, tmp_path):
    given = {
        "precision": "bf16-mixed",
        "max_steps": 7,
        "learning_rate": 0.125,
        "weight_decay": 0.25,
        "recompute_activations": "true",
        "loss_tiles": 5,
        "micro_batch_size": 3,
        "accumulate_grad_batches": 2,
        "num_nodes": 4,
        "seed": 9,
        "scoped_grad_clear": "false",
        "batch_optimizer_step": "false",
        "router_bias_update_speed": 0.001,
        "sub_group_size": 12345,
    }
    seen = arguments_of(monkeypatch, tmp_path, *(f"--{name}={value}" for name, value in given.items()))
    assert (seen["precision"], seen["max_steps"], seen["num_nodes"], seen["devices"]) == ("bf16-mixed", 7, 4, 2)
    assert (seen["accumulate_grad_batches"], seen["limit_train_batches"]) == (2, 14)
    strategy = seen["strategy"]
    # 8 ranks, 8 experts: the largest size that divides both.
    expected = {"expert_parallel_size": 8, "scoped_grad_clear": False, "batch_optimizer_step": False}
    for name, value in {**expected, "router_bias_update_speed": 0.001, "alias_master_weights": True}.items():
        assert getattr(strategy.options, name) == value, name
    assert strategy.config["zero_optimization"]["sub_group_size"] == 12345
    made = seen["module"]
    assert (made.learning_rate, made.weight_decay, made.recompute_activations) == (0.125, 0.25, True)
    assert (made.loss_tiles, made.seed, made.warmup_steps) == (5, 9, RECIPE.settings["tiny"].warmup_steps)
    assert seen["loader"].batch_size == 3
    assert isinstance(seen["loader"].sampler, torch.utils.data.RandomSampler)


def test_a_benchmark_takes_ten_steps(monkeypatch, tmp_path):
    seen = arguments_of(monkeypatch, tmp_path, "--benchmark", "--accumulate_grad_batches", "3")
    assert (seen["max_steps"], seen["limit_train_batches"]) == (10, 30)


def test_the_full_size_is_refused_before_data_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError, match="needs GPUs"):
        train(RECIPE, RECIPE.parse(["--size", "full", "--data", "no/such/file", "--output", str(tmp_path)]))


def test_cudnn_is_the_only_kernel_while_it_is_asked_for():
    backends = torch.backends.cuda

    def enabled() -> list[str]:
        return [
            name for name in ("flash", "mem_efficient", "math", "cudnn") if getattr(backends, f"{name}_sdp_enabled")()
        ]

    before = enabled()
    assert "math" in before
    with only_cudnn("sdpa"):
        assert enabled() == before
    with only_cudnn("cudnn"):
        assert enabled() == ["cudnn"]
    assert enabled() == before


def test_a_run_says_which_attention_it_computes(monkeypatch):
    assert describe(glm45air.tiny_config(), "sdpa") == "Attention: sdpa"
    for installed, text in ((None, "pip install flash-linear-attention"), (object(), ": flash-linear-attention")):
        monkeypatch.setattr(shared.attention, "find_spec", lambda name, found=installed: found)
        assert text in describe(qwen35.tiny_config(), "sdpa")


def test_what_deepspeed_is_told():
    parse = minimax_m3.RECIPE.parse
    full = deepspeed_config(parse(["--size", "full"]), on_gpu=True)
    assert full["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert full["optimizer"]["type"] == "AdamW"
    assert "torch_adam" not in full["optimizer"]["params"]
    assert full["zero_optimization"] == {"stage": 3}
    assert deepspeed_config(parse([]), on_gpu=False) == {"zero_optimization": {"stage": 3}}
    on_cpu = deepspeed_config(parse(["--optimizer", "deepspeed", "--warmup_steps", "0"]), on_gpu=False)
    assert on_cpu["optimizer"]["params"]["torch_adam"]
    assert on_cpu["optimizer"]["params"]["lr"] == parse([]).learning_rate
    assert "scheduler" not in on_cpu
