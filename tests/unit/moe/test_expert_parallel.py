# SPDX-License-Identifier: Apache-2.0
"""Finding the Hugging Face model in a user's module, and what is checked before any process group exists."""

import copy
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.module_inject import auto_ep
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
)

from lightning_zero3.moe.expert_parallel import (
    ExpertParallelTarget,
    NoMoELayerError,
    already_replaced,
    auto_ep_on,
    check_declared_configs,
    check_layers,
    find_target,
    holds_a_model,
    model_type,
)
from lightning_zero3.moe.presets import UnsupportedModelError
from lightning_zero3.topology import Topology
from tests.models import build, build_glm, tiny, tiny_composite, tiny_glm

SECTION = {"enabled": True, "autoep_size": 2}
TWO_OF_FOUR = Topology(world_size=4, expert_parallel_size=2)
SMALL = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    assert torch.distributed.is_initialized() is False
    yield
    assert torch.distributed.is_initialized() is False


class Holder(pl.LightningModule):
    """A LightningModule with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Wrapper(nn.Module):
    """A module of the user's own around a model, of the kind that one level more of names comes from."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@pytest.fixture(scope="module")
def glm() -> Any:
    """Tests only read it."""
    return build_glm(tiny_glm())


@pytest.fixture(scope="module")
def dense_model() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return GptOssForCausalLM(GptOssConfig(**{**SMALL, **EXPERTS, "rope_parameters": rope}))


@pytest.fixture(scope="module")
def minimax_m2() -> Any:
    return MiniMaxM2ForCausalLM(MiniMaxM2Config(**SMALL, **EXPERTS))


# --- Finding the model ---


@pytest.mark.parametrize("name", ["model", "net", "student", "language_model_2"])
def test_the_model_is_found_under_any_attribute(glm: Any, name: str) -> None:
    target = find_target(Holder(**{name: glm}))
    assert target == ExpertParallelTarget(name, glm, "deepseek_v3")


def test_the_model_is_found_two_levels_deep(glm: Any) -> None:
    root = Holder(task=Wrapper(head=nn.Linear(2, 2), inner=Wrapper(net=glm)))
    assert find_target(root) == ExpertParallelTarget("task.inner.net", glm, "deepseek_v3")


def test_the_model_is_found_in_a_list_of_modules(glm: Any) -> None:
    assert find_target(Holder(stages=nn.ModuleList([nn.Linear(2, 2), glm]))).path == "stages.1"


def test_the_model_may_be_the_root_itself(glm: Any) -> None:
    assert find_target(glm) == ExpertParallelTarget("", glm, "deepseek_v3")


def test_models_inside_the_model_are_not_further_ones(glm: Any) -> None:
    # Glm4MoeForCausalLM.model has the same config; the outermost one's layer names are those that presets match.
    assert glm.model.config.model_type == "glm4_moe"
    assert find_target(Holder(net=glm)).module is glm


def test_a_config_on_the_users_module_does_not_make_it_the_model(glm: Any) -> None:
    assert find_target(Holder(net=glm, config=glm.config)).path == "net"
    with pytest.raises(NoMoELayerError, match="holds no Hugging Face model"):
        find_target(Holder(config=glm.config))


@pytest.mark.parametrize("config", [{"model_type": "glm4_moe"}, 3, None], ids=repr)
def test_modules_with_a_config_of_another_kind_are_none(glm: Any, config: Any) -> None:
    backbone = Wrapper(net=glm)
    backbone.config = config
    assert find_target(Holder(backbone=backbone)).path == "backbone.net"


def test_a_requested_preset_is_taken(dense_model: Any) -> None:
    assert find_target(Holder(net=dense_model), "mixtral").preset == "mixtral"
    with pytest.raises(UnsupportedModelError, match="net: expert_parallel_preset='nonsense'"):
        find_target(Holder(net=dense_model), "nonsense")


@pytest.mark.parametrize("requested", available_preset_names())
def test_minimax_m2_is_refused_whatever_preset_is_requested(minimax_m2: Any, requested: str) -> None:
    # With mixtral's it would train another function, without a word.
    with pytest.raises(UnsupportedModelError, match="net: No AutoEP preset computes model_type='minimax_m2'"):
        find_target(Holder(net=minimax_m2), requested)


@pytest.mark.parametrize(("family", "layers"), [("qwen3_5", 2), ("minimax", 2)])
def test_the_text_model_inside_a_composite_is_found(family: str, layers: int) -> None:
    if family == "minimax" and "minimax_m3" not in available_preset_names():
        pytest.skip("the installed DeepSpeed has no preset for it")
    target = find_target(Holder(net=build(tiny_composite(family))))
    assert target.path == "net.model.language_model"
    assert check_layers(target, SECTION, TWO_OF_FOUR) == layers
    check_declared_configs(Holder(config=tiny_composite(family)), None, TWO_OF_FOUR)


def test_a_model_without_a_head_is_no_other_case() -> None:
    backbone = build_glm(tiny_glm(num_hidden_layers=3)).model
    target = find_target(Holder(net=backbone))
    assert target.module is backbone
    assert check_layers(target, SECTION, TWO_OF_FOUR) == 2


def test_a_dense_model_beside_it_is_no_obstacle(glm: Any, dense_model: Any) -> None:
    assert find_target(Holder(teacher=dense_model, student=glm)).path == "student"
    assert find_target(Holder(student=glm, teacher=dense_model)).path == "student"


def test_a_dense_model_beside_it_is_no_obstacle_to_a_requested_preset(glm: Any, dense_model: Any) -> None:
    assert find_target(Holder(teacher=dense_model, student=glm), "deepseek_v3").path == "student"


def test_two_models_with_experts_are_refused_by_name(glm: Any) -> None:
    other = build_glm(tiny_glm(), seed=1)
    with pytest.raises(UnsupportedModelError) as why:
        find_target(Holder(student=glm, task=Wrapper(teacher=other)))
    assert "student (glm4_moe)" in str(why.value)
    assert "task.teacher (glm4_moe)" in str(why.value)
    assert "one model per engine" in str(why.value)


def test_one_model_under_two_names_is_one_model(glm: Any) -> None:
    assert find_target(Holder(net=glm, alias=glm)).path == "net"


def test_without_a_hugging_face_model_the_error_says_where_to_build_it() -> None:
    with pytest.raises(NoMoELayerError) as why:
        find_target(Holder(layer=nn.Linear(2, 2)))
    assert "Holder holds no Hugging Face model" in str(why.value)
    assert "configure_model" in str(why.value)


@pytest.mark.parametrize("family", ["gpt_oss", "minimax_m2"])
def test_models_that_no_preset_computes_are_refused_with_what_to_pass(
    family: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(UnsupportedModelError) as why:
        find_target(Holder(net=request.getfixturevalue(family)))
    message = str(why.value)
    assert message.startswith(f"net: No AutoEP preset computes model_type='{family}'")
    assert "register_preset" in message
    for name in available_preset_names():
        assert name in message


def test_every_model_that_was_refused_is_named(gpt_oss: Any, dense_model: Any) -> None:
    with pytest.raises(UnsupportedModelError) as why:
        find_target(Holder(first=gpt_oss, second=dense_model))
    assert "first: " in str(why.value)
    assert "second: " in str(why.value)
    with pytest.raises(UnsupportedModelError, match=r"the module itself: .*'llama'"):
        find_target(dense_model)


def test_whether_a_model_is_built_already(glm: Any, dense_model: Any) -> None:
    assert holds_a_model(Holder(task=Wrapper(net=glm)))
    assert holds_a_model(dense_model)
    assert not holds_a_model(Holder(config=glm.config))
    assert not holds_a_model(nn.Linear(2, 2))


def test_the_model_type_is_the_configs(glm: Any, gpt_oss: Any) -> None:
    assert (model_type(glm), model_type(gpt_oss)) == ("glm4_moe", "gpt_oss")


# --- Checking its layers ---


@pytest.mark.parametrize(("layers", "dense", "moe"), [(2, 1, 1), (3, 1, 2), (2, 0, 2)])
def test_moe_layers_are_counted_wherever_the_model_hangs(layers: int, dense: int, moe: int) -> None:
    model = build_glm(tiny_glm(num_hidden_layers=layers, first_k_dense_replace=dense))
    for root in (model, Holder(net=model), Holder(task=Wrapper(net=model))):
        assert check_layers(find_target(root), SECTION, TWO_OF_FOUR) == moe


def test_checking_changes_neither_section_nor_model(glm: Any) -> None:
    section = {**SECTION, "load_balance_coeff": None}
    before, kinds = copy.deepcopy(section), [type(module) for module in glm.modules()]
    check_layers(find_target(Holder(net=glm)), section, TWO_OF_FOUR)
    assert section == before
    assert [type(module) for module in glm.modules()] == kinds


def test_a_dense_configuration_is_refused_with_what_was_seen() -> None:
    dense = build_glm(tiny_glm(first_k_dense_replace=2, num_hidden_layers=2))
    with pytest.raises(NoMoELayerError) as why:
        check_layers(find_target(Holder(net=dense)), SECTION, TWO_OF_FOUR)
    message = str(why.value)
    for seen in (
        "expert_parallel_size=2",
        "preset 'deepseek_v3'",
        "net (Glm4MoeForCausalLM)",
        "model_type='glm4_moe'",
        "model, lm_head",
    ):
        assert seen in message, seen


def test_a_preset_that_does_not_fit_the_model_is_refused(dense_model: Any) -> None:
    with pytest.raises(NoMoELayerError, match="preset 'mixtral' finds no MoE layer in the module"):
        check_layers(find_target(dense_model, "mixtral"), SECTION, TWO_OF_FOUR)


def test_other_errors_of_the_parser_come_through_as_they_are() -> None:
    # The clamp would be lost, which DeepSpeed itself refuses: no "no MoE layers" of ours may hide that.
    model = build_glm(tiny_glm())
    model.config.swiglu_limit = 7.0
    with pytest.raises(ValueError, match="clamp their SwiGLU") as why:
        check_layers(find_target(model), SECTION, TWO_OF_FOUR)
    assert not isinstance(why.value, NoMoELayerError)


@pytest.mark.parametrize("name", ["router_jitter_noise", "router_z_loss_coef"])
def test_what_autoeps_router_does_not_do_is_refused(name: str) -> None:
    target = find_target(Holder(net=build(tiny("mixtral"))))
    assert check_layers(target, SECTION, TWO_OF_FOUR) == 2
    setattr(target.module.config, name, 0.1)
    with pytest.raises(UnsupportedModelError, match=rf"{name}=0\.1 in the config of net \(Mixtral.*Set {name} to 0"):
        check_layers(target, SECTION, TWO_OF_FOUR)


def test_experts_that_cannot_be_shared_out_are_refused_with_sizes_that_work() -> None:
    model = build_glm(tiny_glm(n_routed_experts=6))
    with pytest.raises(ValueError, match="doesn't divide the 6 experts") as why:
        check_layers(find_target(Holder(net=model)), {**SECTION, "autoep_size": 4}, Topology(8, 4))
    assert "expert_parallel_size=4" in str(why.value)
    assert "net.model.layers.1.mlp" in str(why.value)
    assert str(why.value).endswith("Sizes that divide both the experts and the 8 ranks: 1, 2.")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sizes_that_divide_the_experts_pass(glm: Any, size: int) -> None:
    assert check_layers(find_target(glm), {**SECTION, "autoep_size": size}, Topology(4, size)) == 1


# --- A model that isn't built yet ---


def test_a_declared_config_with_experts_passes() -> None:
    check_declared_configs(Holder(config=tiny_glm()), None, TWO_OF_FOUR)
    check_declared_configs(Holder(glm_config=tiny_glm()), "deepseek_v3", TWO_OF_FOUR)


def test_without_a_declared_config_there_is_nothing_to_check() -> None:
    check_declared_configs(Holder(), None, TWO_OF_FOUR)
    check_declared_configs(Holder(config={"model_type": "gpt_oss"}, name="gpt_oss"), None, TWO_OF_FOUR)


def test_a_declared_config_whose_experts_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 experts of Holder\.config \(model_type='glm4_moe'\).*8 ranks: 1, 2, 4\.$"):
        check_declared_configs(Holder(config=tiny_glm()), None, Topology(8, 8))


@pytest.mark.parametrize("config", [GptOssConfig(**SMALL), MiniMaxM2Config(**SMALL)], ids=lambda c: c.model_type)
def test_a_declared_config_that_no_preset_computes_is_refused(config: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type='{config.model_type}'.*register_preset"):
        check_declared_configs(Holder(config=config), None, TWO_OF_FOUR)


def test_a_declared_config_without_experts_is_refused() -> None:
    with pytest.raises(NoMoELayerError) as why:
        check_declared_configs(Holder(llama=LlamaConfig(**SMALL)), "deepseek_v3", TWO_OF_FOUR)
    for seen in ("expert_parallel_size=2", "Holder.llama", "model_type='llama'", "no n_routed_experts"):
        assert seen in str(why.value), seen


@pytest.mark.parametrize("requested", [None, "deepseek_v3"])
def test_a_declared_dense_config_beside_it_is_no_obstacle(requested: str | None) -> None:
    check_declared_configs(Holder(teacher=LlamaConfig(**SMALL), student=tiny_glm()), requested, TWO_OF_FOUR)


# --- AutoEP on the nested model ---


def settings_for(size: int = 1) -> Any:
    return parse_autoep_config({"enabled": True, "autoep_size": size, "preset_model": "deepseek_v3"})


def test_inside_the_block_autoep_works_on_the_target_whatever_it_is_given(glm: Any) -> None:
    root = Holder(task=Wrapper(net=glm))
    # What makes the block necessary: from the root, the model's layers have names that no preset matches.
    with pytest.raises(ValueError, match="no MoE layers detected"):
        auto_ep.AutoEP(root, settings_for()).ep_parser()
    with auto_ep_on(find_target(root)):
        inside = auto_ep.AutoEP(root, settings_for())
        assert inside.model is glm
        assert inside.model_config is glm.config
        assert [layer.moe_module_name for layer in inside.ep_parser()] == ["model.layers.1.mlp"]


def test_the_class_inside_the_block_is_an_autoep(glm: Any) -> None:
    upstream = auto_ep.AutoEP
    with auto_ep_on(find_target(glm)):
        assert issubclass(auto_ep.AutoEP, upstream)
        assert auto_ep.AutoEP is not upstream


def test_the_upstream_class_is_back_afterwards(glm: Any) -> None:
    upstream = auto_ep.AutoEP
    with auto_ep_on(find_target(glm)):
        pass
    assert auto_ep.AutoEP is upstream
    with pytest.raises(RuntimeError, match="while initializing"), auto_ep_on(find_target(glm)):
        raise RuntimeError("while initializing")
    assert auto_ep.AutoEP is upstream


def test_layers_that_are_in_place_already_are_seen_at_any_depth() -> None:
    model = build_glm(tiny_glm(num_hidden_layers=3))
    root = Holder(task=Wrapper(net=model))
    assert not already_replaced(root)
    with auto_ep_on(find_target(root)):
        parser = auto_ep.AutoEP(root, settings_for())
        parser.replace_moe_layers(parser.ep_parser(), ep_size=1, ep_rank=0)
    assert already_replaced(root)
    assert already_replaced(model)
