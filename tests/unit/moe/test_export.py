# SPDX-License-Identifier: Apache-2.0
"""What is written is what Transformers' own save writes, to the byte; and over a base checkpoint, what that one has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_zero3 import cli
from lightning_zero3.config import SetupError
from lightning_zero3.moe.export import NotExportedError, save_pretrained
from lightning_zero3.moe.export_folder import ExportFolder
from lightning_zero3.moe.load import UnfitWeightsError, load_pretrained
from lightning_zero3.moe.safetensors_files import INDEX, SINGLE
from tests.models import COMPOSITES, FAMILIES, build, tiny, tiny_composite


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same_files(ours: Path, theirs: Path) -> None:
    left, right = contents(ours), contents(theirs)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name
    for name in ("config.json", "generation_config.json"):
        mine, other = (json.loads((folder / name).read_text()) for folder in (ours, theirs))
        assert mine == other, name
    if (theirs / INDEX).is_file():
        mine, other = (json.loads((folder / INDEX).read_text()) for folder in (ours, theirs))
        assert mine["metadata"] == other["metadata"]
        assert mine["weight_map"] == {
            name: path.name for path in ours.glob("*.safetensors") for name in load_file(path)
        }
        assert all(path.stat().st_size < 70_000 for path in ours.glob("*.safetensors"))


# What the loaders of vLLM's public source take for experts: `get_expert_mapping` of the model's class.
VLLM_EXPERTS = {
    "glm": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
    "qwen3": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
    "mixtral": r"model\.layers\.\d+\.block_sparse_moe\.experts\.\d+\.w[123]\.weight",
    "qwen3_5": r"model\.layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj|\d+\.(gate|up|down)_proj\.weight)",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_files_as_transformers_own(tmp_path, family):
    model = build(tiny(family, tie_word_embeddings=family == "mixtral"), seed=5)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    report = save_pretrained(model, tmp_path / "ours", max_shard_size="60KB")
    assert report is not None
    assert len(report.files) > 1
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    names = list(contents(tmp_path / "ours"))
    assert ("lm_head.weight" in names) is (family != "mixtral")
    experts = [name for name in names if ".experts." in name]
    assert experts
    assert all(re.fullmatch(VLLM_EXPERTS.get(family, ".*"), name) for name in experts)
    assert bool(report.notes) is model.config.model_type.endswith("_text")
    save_pretrained(model, tmp_path / "single")
    assert [path.name for path in (tmp_path / "single").glob("model*")] == [SINGLE]


@pytest.mark.parametrize("family", ["glm", "qwen3"])
def test_in_sixteen_bits_what_transformers_keeps_in_fp32_stays(tmp_path, family):
    model = build(tiny(family), seed=5)
    save_pretrained(model, tmp_path / "ours", dtype="bf16")
    model.save_pretrained(tmp_path / "whole")
    theirs = FAMILIES[family][1].from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("family", COMPOSITES)
def test_over_a_composite_checkpoint_the_rest_is_carried_over(tmp_path, family):
    composite = build(tiny_composite(family), seed=5)
    composite.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    text = build(tiny(family), seed=1)
    load_pretrained(text, tmp_path / "base")
    with torch.no_grad():
        for value in text.state_dict().values():
            value += 0.5
    report = save_pretrained(text, tmp_path / "out", base=tmp_path / "base")
    assert report is not None
    assert report.carried
    assert report.notes == ()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    before, after = (contents(tmp_path / name) for name in ("base", "out"))
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == set(report.carried)
    _, model_class, _ = COMPOSITES[family]
    back = model_class.from_pretrained(tmp_path / "out")
    other = build(tiny(family), seed=2)
    load_pretrained(other, tmp_path / "out")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in text.state_dict().items())
    assert {name for name, _ in back.named_parameters()} == {name for name, _ in composite.named_parameters()}


def test_a_subclass_that_an_object_was_given_is_no_architecture(tmp_path):
    model = build(tiny("mixtral"), seed=5)
    model.__class__ = type("Tiled", (type(model),), {"__module__": "elsewhere"})
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]


def test_a_base_of_another_model_is_refused_and_nothing_written(tmp_path):
    build(tiny("mixtral"), seed=5).save_pretrained(tmp_path / "base")
    with pytest.raises(UnfitWeightsError, match=r"missing: .*Nothing was written"):
        save_pretrained(build(tiny("qwen3"), seed=5), tmp_path / "out", base=tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_what_is_there_is_replaced_only_when_asked_and_only_an_export(tmp_path):
    model = build(tiny("mixtral"), seed=5)
    out = tmp_path / "out"
    save_pretrained(model, out)
    with pytest.raises(NotExportedError, match="isn't empty"):
        save_pretrained(model, out)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    save_pretrained(model, out, overwrite=True)
    assert not contents(out)["lm_head.weight"].any()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("")
    with pytest.raises(NotExportedError, match="no Hugging Face folder"):
        save_pretrained(model, tmp_path / "photos", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "photos"}


def test_what_a_killed_export_leaves_has_no_name_of_its_own_and_is_cleared_away(tmp_path):
    killed = ExportFolder(tmp_path / "out", {"a": ((2,), torch.float32), "b": ((2,), torch.float32)}, 8, parameters=4)
    killed.add("a", torch.ones(2))
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.unfinished"
    assert [path.name for path in left.iterdir()] == ["model-00001-of-00002.safetensors"]
    save_pretrained(build(tiny("mixtral")), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "one of fp32, bf16, fp16"),
        ({"max_shard_size": "large"}, "max_shard_size='large'"),
        ({"tokenizer": "/nowhere"}, "/nowhere is no folder"),
    ],
)
def test_options_that_cant_be(tmp_path, options: dict[str, Any], said):
    with pytest.raises(SetupError, match=said):
        save_pretrained(build(tiny("mixtral")), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "CHECKPOINT OUT --config DIR"),
        (["{0}/none", "{0}/out"], "--config DIR"),
        (["{0}/none", "{0}/out", "--config", "{0}/none"], "can't be read"),
        (["{0}/none", "{0}/out", "--config", "{0}"], "is no sharded checkpoint"),
        (["{0}/none", "{0}/out", "--config", "{0}", "--dtype", "int8"], "--dtype"),
        (["{0}/none", "{0}", "--config", "{0}"], "is read for this export"),
    ],
)
def test_the_command_refuses_in_a_line(tmp_path, capsys, arguments, said):
    tiny("mixtral").save_pretrained(tmp_path)
    before = set(tmp_path.iterdir())
    assert cli.main(["export", *(each.format(tmp_path) for each in arguments)]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
    assert set(tmp_path.iterdir()) == before
