# SPDX-License-Identifier: Apache-2.0
"""AutoEP's layers are the same function as Transformers': logits, losses and every gradient, for each model family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe import expert_parallel, presets, tensor_parallel
from lightning_zero3.substitution import substituted
from tests.fits import Sentences, fit
from tests.models import COMPOSITES, FAMILIES, build, tiny, tiny_composite
from tests.parity import Observed, batch_of, relative_errors

# GLM has no auxiliary loss in Transformers.
WITH_AUXILIARY_LOSS = [family for family in FAMILIES if family != "glm"]
EXACT = 1e-5


@pytest.fixture(autouse=True)
def needs_its_preset(request: pytest.FixtureRequest) -> None:
    # DeepSpeed 0.19.7 has none for MiniMax-M3.
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("family") == "minimax" and "minimax_m3" not in available_preset_names():
        pytest.skip("the installed DeepSpeed has no preset for it")


def compared(family: str, options: dict[str, Any], trap: str | None = None) -> dict[str, float]:
    arguments = {"output_router_logits": True} if family in WITH_AUXILIARY_LOSS else {}
    with TRAPS[trap]() if trap else nullcontext():
        return relative_errors(tiny(family), options, arguments)


def composite(family: str, options: dict[str, Any]) -> dict[str, float]:
    return relative_errors(tiny_composite(family), options, {"output_router_logits": True})


def losing_norms() -> Any:
    plans = {
        kind: [spec for spec in plan if "grad_allreduce" not in spec] for kind, plan in tensor_parallel._PLANS.items()
    }
    return substituted(tensor_parallel, "_PLANS", plans)


# Each leaves one trap open: without what closes it, the numbers must differ.
TRAPS: dict[str, Callable[[], Any]] = {
    "a generic softmax preset": lambda: substituted(presets, "_PRESETS", {"glm4_moe": "qwen3_moe"}),
    "probabilities in the auxiliary loss": lambda: substituted(
        expert_parallel, "as_transformers_records", lambda layers, _: layers
    ),
    "gradients of heads' norms not summed": losing_norms,
}


def assert_exact(family: str, every_ranks: list[dict[str, float]]) -> None:
    for errors in every_ranks:
        assert ("aux_loss" in errors) is (family in WITH_AUXILIARY_LOSS)
        assert {"loss", "logits"} < set(errors)
        assert max(errors.values()) < EXACT, {name: error for name, error in errors.items() if not error < EXACT}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_with_autoep_layers(ranks, family):
    assert_exact(family, ranks(1).run(compared, family, {"expert_parallel_size": 1}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 2},
        {"tensor_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2, "expert_parallel_size": 2}, id="both", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks(ranks, family, options):
    assert_exact(family, ranks(2).run(compared, family, options))


@pytest.mark.parametrize("family", COMPOSITES)
@pytest.mark.parametrize("size", ["expert_parallel_size", "tensor_parallel_size"])
def test_the_text_model_of_a_composite(ranks, family, size):
    assert_exact(family, ranks(2).run(composite, family, {size: 2}))


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "qwen3_5" else pytest.mark.slow) for family in FAMILIES]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"expert_parallel_size": 4}, marks=pytest.mark.slow),
        pytest.param({"expert_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "expert_parallel_size": 2}, id="both", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "expert_parallel_size": 4}, id="both 4", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_ranks(ranks, family, options):
    assert_exact(family, ranks(4).run(compared, family, options))


def fixed(name: str, value: Any) -> dict[str, Any]:
    """Options with an entry of AutoEP's section that overrides what the model's config says."""
    return {"config": {"expert_parallel": {name: value}}, "expert_parallel_size": 1}


@pytest.mark.parametrize(
    ("family", "options", "trap", "wrong"),
    [
        ("glm", fixed("routed_scaling_factor", 1.0), None, {"logits", "loss"}),
        ("minimax", fixed("routed_scaling_factor", 1.0), None, {"logits", "loss"}),
        ("glm", {"expert_parallel_size": 1}, "a generic softmax preset", {"logits", "loss"}),
        ("qwen3_5", {"expert_parallel_size": 1}, "probabilities in the auxiliary loss", {"aux_loss"}),
        (
            "qwen3",
            {"tensor_parallel_size": 2},
            "gradients of heads' norms not summed",
            {"d model.layers.0.self_attn.q_norm.weight", "d model.layers.0.self_attn.k_norm.weight"},
        ),
    ],
    ids=["scaling lost, glm", "scaling lost, minimax", "softmax", "probabilities", "norms"],
)
def test_a_trap_left_open_is_seen(ranks, family, options, trap, wrong):
    for errors in ranks(options.get("tensor_parallel_size", 1)).run(compared, family, options, trap):
        exceeded = {name for name, error in errors.items() if not error < EXACT}
        assert wrong <= exceeded, {name: errors[name] for name in wrong}


def started_differently(corrected: bool) -> dict[str, float]:
    with nullcontext() if corrected else substituted(tensor_parallel, "start_alike", lambda _: None):
        return relative_errors(tiny("glm"), {"tensor_parallel_size": 2}, {}, seed=torch.distributed.get_rank())


def test_ranks_that_draw_different_values_train_rank_0s_model(ranks):
    assert_exact("glm", ranks(2).run(started_differently, True))
    assert max(ranks(2).run(started_differently, False)[0].values()) > 0.1


def bf16_routing(family: str, as_upstream: bool) -> dict[str, float]:
    """Train a step in bf16; what the first MoE layer's router chose, against a router of Transformers' own."""
    seen: list[Any] = []

    class Watched(Observed):
        def on_train_start(self) -> None:
            layer = next(m for m in self.modules() if getattr(m, "_is_autoep_layer", False))
            layer.router.register_forward_hook(lambda _, tokens, chosen: seen.append((tokens[0], *chosen)))

    module = Watched(build(tiny(family)), batch_of(0))
    with substituted(expert_parallel, "routers_in_fp32", lambda *_: []) if as_upstream else nullcontext():
        fit(module, Sentences(64), Zero3FastStrategy(expert_parallel_size=1), steps=1, precision="bf16-mixed")
    tokens, weights, experts, _ = seen[0]
    name, router = next((n, m) for n, m in build(tiny(family)).named_modules() if n.endswith(".mlp.gate"))
    biases = dict(router.named_buffers())
    router = router.to(torch.bfloat16)
    for buffer, value in biases.items():
        setattr(router, buffer, value)
    with torch.no_grad():
        _, their_weights, their_experts = router(tokens.detach())

    def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(weights), 8).scatter(1, experts, weights.detach().float())

    ours, theirs = dense(weights, experts), dense(their_weights, their_experts)
    if family == "minimax":  # its block scales afterwards
        theirs = theirs * tiny(family).routed_scaling_factor
    assert tokens.dtype == torch.bfloat16, name
    return {"weights": float((ours - theirs).norm() / theirs.norm())}


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_routers_choose_as_transformers_own(ranks, family):
    # Qwen's own rounds its weights to bf16 in the end.
    bound = 4e-3 if family.startswith("qwen") else EXACT
    assert ranks(1).run(bf16_routing, family, False)[0]["weights"] < bound
    if family == "glm":
        assert ranks(1).run(bf16_routing, family, True)[0]["weights"] > 10 * EXACT
