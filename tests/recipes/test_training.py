# SPDX-License-Identifier: Apache-2.0
"""The recipes' own module and strategy on real ranks: options that must not change what is learned, and others."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.recipes import RECIPES, observed

EACH = list(RECIPES)


def assert_same(left, right, *, losses: float, gradients: float) -> None:
    assert left["losses"] == pytest.approx(right["losses"], abs=losses)
    assert left["gradients"].keys() == right["gradients"].keys()
    for name, ours in left["gradients"].items():
        theirs = right["gradients"][name]
        assert (ours - theirs).norm() <= gradients * theirs.norm() + 1e-9, name


@pytest.mark.parametrize(
    "name", ["glm45air", *(pytest.param(n, marks=pytest.mark.slow) for n in EACH if n != "glm45air")]
)
def test_recomputed_activations_and_tiles_change_no_loss_and_no_gradient(ranks, name):
    plain = ranks(2).run(observed, name, ("--accumulate_grad_batches", "2"))
    # 7 tiles of 64 tokens are uneven.
    lean = ("--accumulate_grad_batches", "2", "--recompute_activations", "true", "--loss_tiles", "7")
    for ours, theirs in zip(ranks(2).run(observed, name, lean), plain, strict=True):
        assert len(ours["losses"]) == 6
        assert_same(ours, theirs, losses=2e-5, gradients=1e-5)
    # Expert parallel ranks see different data.
    assert plain[0]["losses"] != plain[1]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimax_m3", "glm45air", "qwen35"])
def test_tiles_under_tensor_parallelism(ranks, name):
    options = ("--tensor_parallel_size", "2", "--recompute_activations", "true")
    plain = ranks(2).run(observed, name, options)
    for ours, theirs in zip(ranks(2).run(observed, name, (*options, "--loss_tiles", "4")), plain, strict=True):
        assert_same(ours, theirs, losses=2e-5, gradients=1e-5)
    # Peers share their data.
    assert plain[0]["losses"] == plain[1]["losses"]


def test_an_optimizer_named_in_the_deepspeed_config_learns_the_same(ranks):
    # Through the warm-up and beyond, and with a decay that would show.
    options = ("--max_steps", "6", "--warmup_steps", "3", "--weight_decay", "0.5", "--learning_rate", "0.01")
    torchs, deepspeeds = (
        ranks(2).run(observed, "glm45air", ("--optimizer", optimizer, *options))[0]
        for optimizer in ("torch", "deepspeed")
    )
    assert torchs["losses"] == pytest.approx(deepspeeds["losses"], abs=2e-5)
    assert abs(torchs["losses"][0] - torchs["losses"][-1]) > 0.1
    constant = ranks(2).run(observed, "glm45air", ("--optimizer", "deepspeed", *options, "--warmup_steps", "0"))[0]
    assert constant["losses"] != pytest.approx(torchs["losses"], abs=1e-3)


def test_sub_groups_are_cut_where_it_is_asked_for(ranks):
    few = ranks(2).run(observed, "glm45air", ())[0]
    many = ranks(2).run(observed, "glm45air", ("--sub_group_size", "50000"))[0]
    assert few["sub_groups"] == 3  # routers, experts and all else
    assert many["sub_groups"] > 6
    assert many["losses"] == pytest.approx(few["losses"], abs=1e-6)


@pytest.mark.slow
def test_the_settings_of_the_reports_in_bf16(ranks):
    """Every option of the full MiniMax-M3 that a CPU can do, on its tiny model."""
    full = RECIPES["minimax_m3"].SETTINGS["full"]
    names = ("precision", "bf16_masters", "recompute_activations", "optimizer", "loss_tiles")
    options = [text for name in names for text in (f"--{name}", str(getattr(full, name)).lower())]
    seen = ranks(2).run(observed, "minimax_m3", (*options, "--tensor_parallel_size", "2"))[0]
    assert (seen["masters"], seen["moments"]) == ("torch.bfloat16", "torch.bfloat16")
    assert seen["aliased"] == seen["sub_groups"]
    fp32_masters = ranks(2).run(observed, "minimax_m3", (*options, "--bf16_masters", "false"))[0]
    assert (fp32_masters["masters"], fp32_masters["moments"]) == ("torch.float32", "torch.float32")
    assert fp32_masters["aliased"] == 0
    assert all(torch.isfinite(gradient).all() for gradient in seen["gradients"].values())


@pytest.mark.parametrize(
    "name", ["glm45air", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen35", "minimax_m3"))]
)
def test_attention_in_python_is_torchs(ranks, name):
    sdpa, eager = (ranks(2).run(observed, name, ("--attention", which))[0] for which in ("sdpa", "eager"))
    assert_same(sdpa, eager, losses=2e-4, gradients=1e-4)
    assert sdpa["calls_of_torchs_attention"] >= 3
    assert eager["calls_of_torchs_attention"] == 0
