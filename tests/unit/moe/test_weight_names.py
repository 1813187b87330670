# SPDX-License-Identifier: Apache-2.0
"""Names in files and in models, each way, and what of a checkpoint isn't the model's: all against Transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lightning_zero3.config import SetupError
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.file_names import FileNames
from lightning_zero3.moe.load import UnfitWeightsError, load_pretrained
from lightning_zero3.moe.own_part import NotWritableError
from lightning_zero3.moe.safetensors_files import SINGLE
from lightning_zero3.moe.weight_names import held_tensors
from lightning_zero3.moe.weight_plan import COMPUTED, IGNORED, OTHER_MODALITIES, PREDICTION, TIED
from tests.models import COMPOSITES, FAMILIES, build, tiny, tiny_composite


def file_names(model: PreTrainedModel) -> FileNames:
    return FileNames(model, {held.name: held.whole for _, held in held_tensors(model).values()})


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder, **options)
    return load_file(folder / SINGLE)


def edited(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / SINGLE)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def assert_same(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    theirs = reference.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_names_there_and_back_are_those_that_transformers_saves(tmp_path, family):
    model = build(tiny(family))
    files, names = saved(model, tmp_path), file_names(model)
    parts = {name: names.saved_as(name) for name in model.state_dict()}
    assert {part.name: part.shape for each in parts.values() for part in each} == {
        name: tuple(value.shape) for name, value in files.items()
    }
    # Each way the same: what a tensor is saved as is what it is read from.
    back, others = names.sort(list(files))
    assert others == {}
    assert {name: sorted((p.name, p.block) for p in each) for name, each in back.items()} == {
        name: sorted((p.name, p.block) for p in each) for name, each in parts.items()
    }
    for name, value in model.state_dict().items():
        for part in parts[name]:
            box = tuple(slice(b, b + n) for b, n in zip(part.block.here, part.block.size, strict=True))
            assert torch.equal(value[box].reshape(part.shape), files[part.name])


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_composite_checkpoint_loads_its_text_model(tmp_path, family):
    composite = build(tiny_composite(family), seed=5)
    tensors = saved(composite, tmp_path)
    # As the published ones have it.
    extra = {"mtp.layers.0.mlp.gate.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    edited(tmp_path, {**tensors, **extra})
    text = build(tiny(family), seed=1)
    report = load_pretrained(text, tmp_path)
    theirs = {re.sub(r"^model\.language_model\.", "model.", n): v for n, v in composite.state_dict().items()}
    for name, value in text.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert set(report.skipped) == {OTHER_MODALITIES, PREDICTION}
    assert set(report.skipped[PREDICTION]) == set(extra)
    vision = {name for name in tensors if "vis" in name or "multi_modal" in name or "patch_merge" in name}
    assert vision
    assert set(report.skipped[OTHER_MODALITIES]) == vision
    assert f"{len(vision)} skipped ({OTHER_MODALITIES})" in str(report)


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_composite_is_loaded_whole_too(tmp_path, family):
    composite = build(tiny_composite(family), seed=5)
    composite.save_pretrained(tmp_path)
    other = build(tiny_composite(family), seed=6)
    load_pretrained(other, tmp_path)
    assert_same(other, composite)


def test_glms_layers_for_further_tokens_are_skipped(tmp_path):
    model = build(tiny("glm"), seed=5)
    tensors = saved(model, tmp_path)
    extra = {
        f"model.layers.3.{name}": torch.ones(2)
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight", "enorm.weight")
    }
    edited(tmp_path, {**tensors, **extra}, num_nextn_predict_layers=0)
    other = build(tiny("glm"), seed=6)
    with pytest.raises(UnfitWeightsError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load_pretrained(other, tmp_path)
    edited(tmp_path, {**tensors, **extra}, num_nextn_predict_layers=1)
    assert set(load_pretrained(other, tmp_path).skipped[PREDICTION]) == set(extra)
    assert_same(other, model)


def test_everything_that_doesnt_fit_is_listed_and_nothing_written(tmp_path):
    model = build(tiny("qwen3"), seed=5)
    tensors = saved(model, tmp_path)
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = torch.ones(16, 32)
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.ones(32, 15)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].long()
    tensors["model.embed_tokens.weight"] = torch.ones(63, 32)
    tensors["something.else"] = torch.ones(1)
    tensors["embed_tokens.weight"] = torch.ones(63, 32)
    edited(tmp_path, tensors)
    other = build(tiny("qwen3"), seed=6)
    with pytest.raises(UnfitWeightsError) as refusal:
        load_pretrained(other, tmp_path)
    said = {line.split(":")[0].strip(): line for line in str(refusal.value).splitlines()}
    assert "experts.3.up_proj.weight" in said["missing"]
    assert "model.norm.weight" in said["missing"]
    assert "experts.8.up_proj.weight" in said["unexpected"]
    assert "something.else" in said["unexpected"]
    assert "experts.2.down_proj.weight 32x15, 32x16 in the model" in said["of another shape"]
    assert "model.embed_tokens.weight 63x32, 64x32 in the model" in said["of another shape"]
    assert "lm_head.weight I64, torch.float32 in the model" in said["of another kind"]
    assert "model.embed_tokens.weight" in said["there more than once"]
    assert_same(other, build(tiny("qwen3"), seed=6))


def test_what_may_be_left_out_is_left_as_it_was(tmp_path):
    model = build(tiny("qwen3"), seed=5)
    tensors = saved(model, tmp_path)
    edited(tmp_path, {**{n: v for n, v in tensors.items() if n != "lm_head.weight"}, "value.head": torch.ones(1)})
    other = build(tiny("qwen3"), seed=6)
    head = other.lm_head.weight.clone()
    report = load_pretrained(other, tmp_path, allow_missing=["lm_head"], allow_unexpected=[r"^value\."])
    assert report.kept == ("lm_head.weight",)
    assert report.skipped == {"allow_unexpected": ("value.head",)}
    assert torch.equal(other.lm_head.weight, head)
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)


def test_the_first_layers_of_a_checkpoint(tmp_path):
    model = build(tiny("glm"), seed=5)
    model.save_pretrained(tmp_path)
    first = build(tiny("glm", num_hidden_layers=2), seed=6)
    report = load_pretrained(first, tmp_path, allow_unexpected=[r"^model\.layers\.2\."])
    assert len(report.skipped["allow_unexpected"]) > 10
    assert torch.equal(first.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj)


@pytest.mark.parametrize("under", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_under_either_name(tmp_path, under):
    model = build(tiny("mixtral", tie_word_embeddings=True), seed=5)
    tensors = saved(model, tmp_path)
    edited(
        tmp_path,
        {
            **{n: v for n, v in tensors.items() if "embed" not in n and "lm_head" not in n},
            under: model.lm_head.weight.data,
        },
    )
    other = build(tiny("mixtral", tie_word_embeddings=True), seed=6)
    load_pretrained(other, tmp_path)
    assert_same(other, model)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_tied_embeddings_stored_twice(tmp_path):
    model = build(tiny("mixtral", tie_word_embeddings=True), seed=5)
    tensors = {**saved(model, tmp_path), "lm_head.weight": model.lm_head.weight.data.clone()}
    edited(tmp_path, tensors)
    other = build(tiny("mixtral", tie_word_embeddings=True), seed=6)
    assert load_pretrained(other, tmp_path).skipped == {TIED: ("lm_head.weight",)}
    assert_same(other, model)
    tensors["lm_head.weight"][3, 3] += 1
    edited(tmp_path, tensors)
    with pytest.raises(UnfitWeightsError, match="holds two that differ"):
        load_pretrained(other, tmp_path)
    assert_same(other, model)


def test_buffers_that_are_computed_and_names_that_transformers_ignores(tmp_path):
    model = build(tiny("glm"), seed=5)
    extra = {"model.rotary_emb.inv_freq": torch.ones(8), "model.layers.92.x": torch.ones(1)}
    edited(tmp_path, {**saved(model, tmp_path), **extra})
    other = build(tiny("glm"), seed=6)
    skipped = load_pretrained(other, tmp_path).skipped
    assert skipped == {COMPUTED: ("model.rotary_emb.inv_freq",), PREDICTION: ("model.layers.92.x",)}
    assert_same(other, model)
    assert IGNORED not in skipped


def test_an_expert_under_two_names_is_refused(tmp_path):
    model = build(tiny("qwen3"), seed=5)
    tensors = saved(model, tmp_path)
    # Transformers takes names without the base model's prefix too.
    edited(tmp_path, {**tensors, "layers.0.mlp.experts.0.up_proj.weight": torch.ones(16, 32)})
    with pytest.raises(UnfitWeightsError, match=r"unexpected: (model\.)?layers\.0\.mlp\.experts\.0\.up_proj"):
        load_pretrained(build(tiny("qwen3"), seed=6), tmp_path)


def test_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path, monkeypatch, capsys):
    model = build(tiny("mixtral"), seed=5)
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    load_pretrained(model, tmp_path)
    assert "Loading weights" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_pretrained(model, tmp_path)
    assert "Loading weights" in capsys.readouterr().err


def test_models_without_values_and_modules_without_models(tmp_path):
    build(tiny("mixtral"), seed=5).save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = FAMILIES["mixtral"][1](tiny("mixtral"))
    with pytest.raises(NotWritableError, match="on meta"):
        load_pretrained(meta, tmp_path)
    two = torch.nn.ModuleList([build(tiny("mixtral")), build(tiny("mixtral"))])
    with pytest.raises(SetupError, match=r"0 \(MixtralForCausalLM\), 1 \(MixtralForCausalLM\)"):
        load_pretrained(two, tmp_path)
    load_pretrained(two[1], tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    model = build(tiny("glm"), seed=5)
    edited(tmp_path, saved(model, tmp_path), quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnfitWeightsError, match="quantization_config"):
        load_pretrained(build(tiny("glm"), seed=6), tmp_path)


def test_experts_by_other_numbers_are_not_taken_for_the_first_ones(tmp_path):
    """Transformers stacks what it finds, in order: experts 1 to 8 would silently be 0 to 7."""
    model = build(tiny("qwen3"), seed=5)
    tensors = saved(model, tmp_path)
    moved = {re.sub(r"experts\.(\d)", lambda m: f"experts.{int(m[1]) + 1}", name): v for name, v in tensors.items()}
    edited(tmp_path, moved)
    with pytest.raises(UnfitWeightsError, match=r"(?s)missing: .*experts\.0\..*unexpected: .*experts\.8\."):
        load_pretrained(build(tiny("qwen3"), seed=6), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_in_place_of_drawn_values(tmp_path, family, dtype):
    build(tiny(family), seed=5).to(dtype).save_pretrained(tmp_path)
    theirs = FAMILIES[family][1].from_pretrained(tmp_path, dtype=torch.float32)
    ours = build_from_config(FAMILIES[family][1], tiny(family), tmp_path)
    assert_same(ours, theirs)
    expected = dict(theirs.named_buffers())
    assert all(torch.equal(value, expected[name]) for name, value in ours.named_buffers())
