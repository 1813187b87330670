# SPDX-License-Identifier: Apache-2.0
"""Which preset a model type gets, which types are refused, and that our own choice computes the model's function."""

import copy
from typing import Any

import pytest
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.module_inject.auto_ep_presets.registry import (
    PRESET_MODELS,
    available_preset_names,
    preset_name_for_hf_model_type,
)

from lightning_zero3.moe import presets
from lightning_zero3.moe.presets import UnsupportedModelError, register_preset, resolve_preset
from tests.models import build_glm, tiny_glm


@pytest.mark.parametrize(
    ("model_type", "preset"),
    [(model_type, name) for name, preset in PRESET_MODELS.items() for model_type in preset.hf_model_types],
)
def test_model_types_that_deepspeed_names_get_its_preset(model_type: str, preset: str) -> None:
    assert resolve_preset(model_type) == preset


@pytest.mark.parametrize("model_type", sorted(t for t, p in presets._PRESETS.items() if p in available_preset_names()))
def test_our_own_types_get_a_preset_that_deepspeed_has_and_does_not_contradict(model_type: str) -> None:
    preset = resolve_preset(model_type)
    assert preset in available_preset_names()
    assert preset_name_for_hf_model_type(model_type) in (None, preset)


@pytest.mark.parametrize("model_type", ["somebodys_moe", "llama", ""])
@pytest.mark.parametrize("requested", available_preset_names())
def test_a_preset_may_be_requested_for_a_type_of_which_nothing_is_known(model_type: str, requested: str) -> None:
    assert resolve_preset(model_type, requested) == requested


@pytest.mark.parametrize("model_type", ["gpt_oss", "minimax_m2", "qwen3_5_moe", "minimax_m3_vl"])
@pytest.mark.parametrize("requested", available_preset_names())
def test_no_preset_may_be_requested_for_a_type_that_none_computes(model_type: str, requested: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"No AutoEP preset computes model_type='{model_type}'"):
        resolve_preset(model_type, requested)


@pytest.mark.parametrize(("model_type", "preset"), [("glm4_moe", "deepseek_v3"), ("mixtral", "mixtral")])
def test_a_request_for_another_function_than_the_models_is_refused(model_type: str, preset: str) -> None:
    assert resolve_preset(model_type, preset) == preset
    with pytest.raises(UnsupportedModelError, match=f"computes another function.*preset is '{preset}': leave") as why:
        resolve_preset(model_type, "qwen3_moe")
    assert "register_preset" in str(why.value)


@pytest.mark.parametrize("model_type", ["glm4_moe", "llama"])
def test_a_requested_preset_that_does_not_exist_is_refused_with_those_that_do(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="expert_parallel_preset='deepseek_v33' is no AutoEP preset") as why:
        resolve_preset(model_type, "deepseek_v33")
    for name in available_preset_names():
        assert name in str(why.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", "experts carry biases and a clamped activation"),
        ("minimax_m2", "scores with a sigmoid and a correction bias"),
    ],
)
def test_types_that_only_look_like_a_preset_are_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type='{model_type}'.*{reason}"):
        resolve_preset(model_type)


@pytest.mark.parametrize(
    ("model_type", "what_to_pass"),
    [
        ("llama", "pass it as expert_parallel_preset"),
        ("something_new", "pass it as expert_parallel_preset"),
        ("gpt_oss", "register one of DeepSpeed's presets"),
        ("minimax_m2", "register one of DeepSpeed's presets"),
        ("qwen3_5_moe", "pass the text-backbone"),
        ("minimax_m3_vl", "pass the text-backbone"),
    ],
)
def test_a_refusal_says_what_to_pass(model_type: str, what_to_pass: str) -> None:
    with pytest.raises(UnsupportedModelError) as why:
        resolve_preset(model_type)
    message = str(why.value)
    assert f"model_type={model_type!r}" in message
    assert what_to_pass in message
    assert "eave expert_parallel_size out" in message
    for name in available_preset_names():
        assert name in message


def test_a_registered_type_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "_PRESETS", dict(presets._PRESETS))
    register_preset("gpt_oss", "mixtral")
    assert resolve_preset("gpt_oss") == "mixtral"
    assert resolve_preset("gpt_oss", "mixtral") == "mixtral"
    assert resolve_preset("glm4_moe") == "deepseek_v3"


def test_a_registered_type_comes_before_deepspeeds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "_PRESETS", dict(presets._PRESETS))
    register_preset("mixtral", "qwen3_moe")
    assert resolve_preset("mixtral") == "qwen3_moe"


def test_a_refusal_is_a_value_error() -> None:
    assert issubclass(UnsupportedModelError, ValueError)


# --- The function behind the name ---

ROUTERS: dict[str, dict[str, Any]] = {
    "GLM-4.5-Air's": {},
    "groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "weights not normalised": {"norm_topk_prob": False},
    "weights scaled": {"routed_scaling_factor": 2.5},
    "two shared experts": {"n_shared_experts": 2},
}
TOKENS = torch.arange(2 * 16).reshape(2, 16)


def with_autoep_layers(model: Any, preset: str) -> Any:
    """A copy whose MoE layers are AutoEP's, with all experts on this rank: no process group is needed for that."""
    replaced = copy.deepcopy(model)
    parser = AutoEP(replaced, parse_autoep_config({"enabled": True, "autoep_size": 1, "preset_model": preset}))
    parser.replace_moe_layers(parser.ep_parser(), ep_size=1, ep_rank=0)
    assert sum(getattr(module, "_is_autoep_layer", False) for module in replaced.modules()) == 1
    return replaced


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_glms_preset_computes_what_glm_computes(router: dict[str, Any]) -> None:
    model = build_glm(tiny_glm(**router))
    torch.testing.assert_close(logits(with_autoep_layers(model, resolve_preset("glm4_moe"))), logits(model))


def test_the_comparison_would_show_a_lost_correction_bias() -> None:
    model = build_glm(tiny_glm())
    replaced = with_autoep_layers(model, "deepseek_v3")
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    assert (logits(replaced) - logits(model)).abs().max() > 1e-2


def test_no_process_group_was_needed() -> None:
    assert torch.distributed.is_initialized() is False
