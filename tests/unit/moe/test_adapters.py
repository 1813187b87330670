# SPDX-License-Identifier: Apache-2.0
"""What of PEFT's can't be shared out, split, loaded or exported is refused before anything is started."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero3 import SaveHuggingFace
from lightning_zero3.config import SetupError
from lightning_zero3.moe import parallel_layers
from lightning_zero3.moe.adapter_export import outline_of
from lightning_zero3.moe.adapters import (
    AdapterError,
    Adapters,
    adapters_of,
    from_record,
    plain_record,
    refuse_loading_under,
)
from lightning_zero3.moe.export import save_pretrained
from lightning_zero3.moe.export_folder import NotExportedError
from lightning_zero3.moe.hugging_face import find_models
from tests.adapters import adapted, strategy_of
from tests.models import build, tiny

peft = pytest.importorskip("peft")


def wrapped(family: str = "glm", **arguments: Any) -> Any:
    return peft.get_peft_model(build(tiny(family)), peft.LoraConfig(r=2, **arguments))


def targets(model: nn.Module, sizes: tuple[int | None, int | None], ranks: int = 4) -> Any:
    return parallel_layers.targets(nn.ModuleDict({"net": model}), strategy_of(sizes).config, ranks)


def test_the_model_is_found_inside_pefts_wrapper_and_left_as_it_was():
    model = adapted("glm", "all-linear")
    names = [name for name, _ in model.named_modules()]
    experts, split, _ = targets(model, (2, None))
    assert (experts.path, experts.module, split) == ("net.base_model.model", model.get_base_model(), None)
    assert [name for name, _ in model.named_modules()] == names
    plain = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), build(tiny("glm")))
    assert find_models(nn.ModuleDict({"net": plain}), lambda _: True)[0] == [("net", plain)]
    assert adapters_of(plain).active == ("default",)


@pytest.mark.parametrize(
    ("arguments", "sizes", "said"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["gate"]}, (2, None), r"modules_to_save has .*mlp\.gate"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, (2, None), r"modules_to_save has .*\.mlp of"),
        ({"target_modules": "all-linear"}, (2, 2), "has an adapter, and expert_parallel_size with tensor_parallel"),
        ({"target_modules": ["q_proj"], "use_dora": True}, (None, 2), "q_proj is split .* its adapter is a variant"),
        ({"target_modules": ["o_proj"], "lora_dropout": 0.1}, (None, 2), "o_proj has lora_dropout"),
        ({"target_modules": ["lm_head"], "lora_dropout": 0.1}, (None, 2), "lm_head has lora_dropout"),
        ({"target_modules": ["o_proj"], "lora_bias": True}, (None, 2), "o_proj is split .* has lora_bias=True"),
        ({"target_modules": ["k_proj"], "modules_to_save": ["q_proj"]}, (None, 2), "modules_to_save has .*q_proj"),
    ],
)
def test_what_parallel_layers_would_lose_is_refused(arguments, sizes, said):
    with pytest.raises(AdapterError, match=said) as refusal:
        targets(wrapped(**arguments), sizes)
    assert "leave" in str(refusal.value).lower()


def test_another_method_on_experts_or_split_layers_is_refused():
    model = build(tiny("qwen3"))
    layers = peft.get_peft_model(model, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(AdapterError, match=r"q_proj is split .* its adapter is PEFT's peft\.tuners\.ia3"):
        targets(layers, (None, 2))
    targets(layers, (2, None))  # where it computes what it computes without


def test_expert_parallelism_needs_no_peft(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)  # an import raises
    experts, _, _ = targets(build(tiny("glm")), (2, None))
    assert experts.path == "net"


@pytest.mark.parametrize("state", ["merged into its weight already", "switched off"])
def test_adapters_that_arent_beside_their_weights_are_refused(tmp_path, state):
    model = adapted("glm", "all-linear")
    if state == "switched off":
        model.base_model.disable_adapter_layers()
    else:
        model.merge_adapter()
    with pytest.raises(AdapterError, match=state):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(AdapterError, match=state):
        targets(model, (2, None))


@pytest.mark.parametrize("fields", [{"init_lora_weights": "OLoRA"}, {"init_lora_weights": "mica"}, {"use_dora": True}])
def test_base_weights_come_before_adapters_that_are_computed_from_them(fields):
    adapters = Adapters({"default": peft.LoraConfig(r=2, **fields)}, ("default",))
    with pytest.raises(AdapterError, match="were computed from the weights that the model had"):
        refuse_loading_under(adapters)


def test_an_adapter_replaces_no_model_and_a_model_no_adapter(tmp_path):
    base, out = tmp_path / "base", tmp_path / "adapter"
    build(tiny("glm")).save_pretrained(base)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    model = wrapped(target_modules=["q_proj"])
    with pytest.raises(NotExportedError, match="is no adapter's folder"):
        save_pretrained(model, base, adapters="only", overwrite=True)
    with pytest.raises(NotExportedError, match="is read for this export"):
        save_pretrained(model, base, base=base, overwrite=True)
    save_pretrained(model, out, adapters="only")
    save_pretrained(model, out, adapters="only", overwrite=True)
    with pytest.raises(NotExportedError, match="is no Hugging Face folder of a model"):
        save_pretrained(model, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_layers_that_the_users_own_config_splits_take_no_adapters():
    strategy = strategy_of((None, 2))
    strategy.config["tensor_parallel"]["partition_config"] = {"layer_specs": []}
    with pytest.raises(AdapterError, match="register_tensor_parallel"):
        parallel_layers.targets(nn.ModuleDict({"net": wrapped(target_modules=["q_proj"])}), strategy.config, 2)


def test_what_isnt_exported_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"adapters=\"only\", and Glm4MoeForCausalLM has none"):
        save_pretrained(build(tiny("glm")), tmp_path / "out", adapters="only")
    with pytest.raises(SetupError, match="adapters='merged': one of merge, only"):
        SaveHuggingFace(tmp_path, adapters="merged")
    tied = peft.get_peft_model(
        build(tiny("glm", tie_word_embeddings=True)), peft.LoraConfig(r=2, target_modules=["lm_head"])
    )
    with pytest.raises(AdapterError, match="are one tensor"):
        save_pretrained(tied, tmp_path / "out")
    started = wrapped(target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(AdapterError, match="which has changed the base weights"):
        save_pretrained(started, tmp_path / "out", adapters="only")
    beside = wrapped(target_modules=["q_proj"])
    beside.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(AdapterError, match=r"that aren't the adapter's: model\.norm\.weight"):
        save_pretrained(beside, tmp_path / "out", adapters="only")
    several = wrapped(target_modules=["q_proj"])
    several.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    several.base_model.set_adapter(["default", "second"])
    with pytest.raises(AdapterError, match="computes with 2 adapters"):
        save_pretrained(several, tmp_path / "out")
    other = peft.get_peft_model(build(tiny("glm")), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(AdapterError, match="of type IA3"):
        save_pretrained(other, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_one_of_several_adapters_is_exported_by_its_name(tmp_path):
    model = wrapped(target_modules=["q_proj"])
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["v_proj"], lora_alpha=5, init_lora_weights=False))
    model.set_adapter("second")
    save_pretrained(model, tmp_path / "adapter", adapters="only")
    save_pretrained(model, tmp_path / "merged")
    alone = peft.PeftModel.from_pretrained(build(tiny("glm")), tmp_path / "adapter").merge_and_unload().state_dict()
    merged = type(model.get_base_model()).from_pretrained(tmp_path / "merged").state_dict()
    theirs = model.merge_and_unload(adapter_names=["second"]).state_dict()
    for ours in (alone, merged):
        assert [name for name, value in theirs.items() if not torch.equal(value, ours[name])] == []


def test_a_record_in_plain_strings_gives_the_same_adapters():
    model = wrapped(target_modules=["q_proj", "o_proj"], use_rslora=True, rank_pattern={"o_proj": 5})
    adapters = adapters_of(model.get_base_model())
    record = plain_record(adapters)
    assert all(isinstance(each, str) for each in record["configs"].values())
    again = from_record(record)
    assert again.active == ("default",)
    ours, theirs = (outline_of(build(tiny("glm")), each) for each in (again, adapters))
    shapes = [{n: v.shape for n, v in each.model.state_dict().items()} for each in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert ours.saved_names() == theirs.saved_names()
