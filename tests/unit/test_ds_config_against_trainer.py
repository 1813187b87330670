# SPDX-License-Identifier: Apache-2.0
"""A config and its Trainer: what differs is refused; and what a run without training keeps of a config."""

import copy
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zero3.config import ConfigConflictError
from lightning_zero3.ds_config import (
    check_against_trainer,
    complete,
    inference_config,
    settle_trainer_values,
)
from tests.ds_configs import (
    BARE,
    OPTIONS,
    PRECISIONS,
    SIXTEEN_BITS,
    check,
    configs,
)


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
