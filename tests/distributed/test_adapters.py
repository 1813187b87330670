# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA beside plain PyTorch and PEFT in one process: trained, saved, resumed, exported alone and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from lightning_zero3 import SaveHuggingFace, cli
from lightning_zero3.moe.adapters import AdapterError
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.load import load_pretrained
from tests.adapters import (
    IDS,
    KINDS,
    Adapted,
    adapted,
    from_pretrained,
    layout_of,
    plain_losses,
    strategy_of,
)
from tests.fits import Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import FAMILIES, build, tiny

peft = pytest.importorskip("peft")

STEPS = 3
# Other orders of additions; `verify_parallel`'s bound.
BOUND = 1e-5
Sizes = tuple[int | None, int | None]


def trains(family: str, kind: str, sizes: Sizes, folder: str) -> dict[str, Any]:
    layout, lane = layout_of(sizes)
    plain, start = adapted(family, kind), adapted(family, kind).state_dict()
    theirs = [losses[lane] for losses in plain_losses(plain, layout.data_parallel_size, STEPS)]
    # MiniMax's indexers choose, and nothing is learnt by that.
    still = {n for n, p in plain.named_parameters() if p.requires_grad and torch.equal(p, start[n])}
    module = Adapted(adapted(family, kind), lane)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    exports = [SaveHuggingFace(f"{folder}/merged"), SaveHuggingFace(f"{folder}/adapter", adapters="only")]
    trainer = fit(module, Sentences(64), strategy_of(sizes), steps=STEPS, precision="32-true", callbacks=[*exports])
    trainer.save_checkpoint(f"{folder}/checkpoint")
    distributed.barrier()
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        # Experts and slices have other names or shapes; the merged export tells of those.
        whole_ones = {n: p for n, p in module.named_parameters() if n in before and p.shape == before[n].shape}
        same = {name for name, parameter in whole_ones.items() if torch.equal(parameter, before[name])}
        whole = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    states = sum(flat.numel() for flat in optimizer_of(trainer).fp32_partitioned_groups_flat)
    partners = layout.data_parallel_size
    return {
        "losses": max(abs(ours / other - 1) for ours, other in zip(module.losses, theirs, strict=True)),
        "moved": abs(theirs[-1] / theirs[0] - 1),
        "changed though frozen": sorted(whole_ones.keys() - same - trained),
        "stood still": sorted((same & trained) ^ {f"some_odd_name.{name}" for name in still}),
        "adapters": all("lora_" in name or "modules_to_save" in name for name in trained),
        # One padded element for each parameter at most.
        "states": (whole // partners, states, whole // partners + len(trained)),
        "logits": module.logits,
    }


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same_files(left: Path, right: Path) -> None:
    ours, theirs = read(left), read(right)
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits.float()
    return logits


def check(ranks: Any, world: int, family: str, kind: str, sizes: Sizes, folder: Path) -> None:
    seen = ranks(world).run(trains, family, kind, sizes, str(folder))
    for each in seen:
        assert each["losses"] < BOUND, each
        assert each["moved"] > 10 * BOUND
        assert each["stood still"] == each["changed though frozen"] == []
        assert each["adapters"]
        low, states, high = each["states"]
        assert low <= states <= high
    engine = seen[0]["logits"]
    # What PEFT makes of the adapter alone.
    model = peft.PeftModel.from_pretrained(build(tiny(family)), folder / "adapter")
    assert (logits_of(model) - engine).norm() < BOUND * engine.norm()
    # And what it makes of both in one process, to the bit.
    theirs = dict(model.merge_and_unload().state_dict())
    ours = from_pretrained(family, f"{folder}/merged")
    assert [n for n, value in ours.state_dict().items() if not torch.equal(value, theirs[n])] == []
    assert (logits_of(ours) - engine).norm() < BOUND * engine.norm()
    untouched = build(tiny(family)).state_dict()
    changed = {name for name, value in theirs.items() if not torch.equal(value, untouched[name])}
    adapters = {name.split(".lora_")[0] for name in read(folder / "adapter") if ".lora_" in name}
    assert 0 < len(changed) <= len(adapters) + 2
    for how, name in (("merge", "merged"), ("only", "adapter")):
        command = ["export", f"{folder}/checkpoint", f"{folder}/filed_{name}", "--config", f"{folder}/merged"]
        assert cli.main([*command, "--adapters", how]) == 0
        assert_same_files(folder / name, folder / f"filed_{name}")
    config = peft.LoraConfig.from_pretrained(folder / "adapter")
    assert (config.r, config.inference_mode) == (4, True)


def test_attention_experts_and_routers_under_expert_parallelism(ranks, tmp_path):
    check(ranks, 2, "glm", "all-linear", (2, None), tmp_path)


def test_attention_and_shared_experts_under_tensor_parallelism(ranks, tmp_path):
    check(ranks, 2, "minimax", "all-linear", (None, 2), tmp_path)


def test_an_embedding_and_a_head_that_are_trained_whole(ranks, tmp_path):
    check(ranks, 1, "qwen3_5", "modules_to_save", (1, None), tmp_path)


def known_to_peft(family: str, kind: str) -> bool:
    # Mixtral has neither shared experts nor dense layers.
    return (family, kind) != ("mixtral", "shared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, (1, None)), (2, (None, None)), (2, (2, None)), (2, (None, 2))],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_kind_and_layout(ranks, tmp_path, family, kind, world, sizes):
    if not known_to_peft(family, kind):
        pytest.skip("PEFT finds no such layer")
    if kind == "dora" and sizes[1] == 2 and family != "minimax":
        with pytest.raises(AssertionError, match="split by tensor_parallel_size, and its adapter is a variant"):
            ranks(world).run(trains, family, kind, sizes, str(tmp_path))
        return
    check(ranks, world, family, kind, sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "modules_to_save", "embeddings"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_slices_on_four_ranks(ranks, tmp_path, family, kind):
    check(ranks, 4, family, kind, (2, 2), tmp_path)


def resumes(sizes: Sizes, other: Sizes, exclude: bool, folder: str) -> dict[str, Any]:
    def strategy(which: Sizes) -> Any:
        return strategy_of(which, exclude_frozen_parameters=exclude)

    _, lane = layout_of(sizes)
    module = Adapted(adapted("glm", "all-linear"), lane)
    trainer = fit(module, Sentences(64), strategy(sizes), steps=2, precision="32-true")
    trainer.save_checkpoint(f"{folder}/checkpoint")
    through = Adapted(adapted("glm", "all-linear"), lane)
    whole = tensors_of(optimizer_of(fit(through, Sentences(64), strategy(sizes), steps=4, precision="32-true")))
    # Another start of the adapters, the same base weights.
    again = Adapted(adapted("glm", "all-linear", seed=11), lane)
    resumed = fit(again, Sentences(64), strategy(sizes), steps=4, precision="32-true", ckpt_path=f"{folder}/checkpoint")
    assert_equal_bits(tensors_of(optimizer_of(resumed)), whole)
    elsewhere = Adapted(adapted("glm", "all-linear", seed=11), lane)
    options = {"resume_layout": "universal", "exclude_frozen_parameters": exclude}
    fit(
        elsewhere,
        Sentences(64),
        strategy_of(other, **options),
        steps=4,
        precision="32-true",
        ckpt_path=f"{folder}/checkpoint",
    )
    return {"through": through.losses[2:], "again": again.losses, "elsewhere": elsewhere.losses}


@pytest.mark.parametrize("exclude", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fit_goes_on_to_the_bit_and_with_other_sizes(ranks, tmp_path, capsys, exclude):
    for seen in ranks(2).run(resumes, (2, None), (1, None), exclude, str(tmp_path)):
        assert seen["again"] == seen["through"]
        assert seen["elsewhere"] == pytest.approx(seen["through"], rel=BOUND)
    command = ["export", f"{tmp_path}/checkpoint", f"{tmp_path}/adapter", "--adapters", "only"]
    build(tiny("glm")).save_pretrained(tmp_path / "base")
    assert cli.main([*command, "--config", f"{tmp_path}/base"]) == 0
    assert len(read(tmp_path / "adapter")) == 36
    merged = ["export", f"{tmp_path}/checkpoint", f"{tmp_path}/merged", "--config", f"{tmp_path}/base"]
    assert cli.main(merged) == (2 if exclude else 0)
    if exclude:
        assert "--adapters only writes all" in capsys.readouterr().err


class Builds(Adapted):
    """Builds, wraps and loads in ``configure_model`` or into the engine."""

    def __init__(self, folder: str, kind: str, when: str) -> None:
        super().__init__(None, 0)
        self.folder, self.kind, self.when = folder, kind, when

    def configure_model(self) -> None:
        if self.some_odd_name is not None:
            return
        weights = self.folder if self.when == "before" else None
        model = build_from_config(FAMILIES["glm"][1], tiny("glm"), weights)
        torch.manual_seed(5)
        self.some_odd_name = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **KINDS[self.kind]))
        if self.when == "after":
            load_pretrained(self, self.folder)

    def on_fit_start(self) -> None:
        if self.when == "engine":
            load_pretrained(self, self.folder)


def builds(folder: str, kind: str, when: str, sizes: Sizes) -> tuple[list[float], list[float]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = peft.get_peft_model(from_pretrained("glm", folder), peft.LoraConfig(r=4, lora_alpha=8, **KINDS[kind]))
    module = Builds(folder, kind, when)
    fit(module, Sentences(64), strategy_of(sizes), steps=STEPS, precision="32-true")
    return module.losses, [losses[0] for losses in plain_losses(whole.train(), 1, STEPS)]


@pytest.mark.parametrize(
    ("kind", "when", "sizes"),
    [
        ("all-linear", "after", (2, None)),
        ("modules_to_save", "engine", (None, 2)),
        ("modules_to_save", "after", (None, None)),
        ("dora", "before", (None, None)),
    ],
)
def test_adapters_in_partitions_start_as_in_a_whole_model(ranks, tmp_path, kind, when, sizes):
    build(tiny("glm"), seed=3).save_pretrained(tmp_path / "base")
    for ours, theirs in ranks(2).run(builds, f"{tmp_path}/base", kind, when, sizes):
        assert ours == pytest.approx(theirs, rel=BOUND)


def loads_too_late(folder: str) -> str:
    with pytest.raises(AdapterError) as refusal:
        load_pretrained(adapted("glm", "dora"), folder)
    return str(refusal.value)


def test_base_weights_under_adapters_that_were_computed_from_others_are_refused(ranks, tmp_path):
    build(tiny("glm"), seed=3).save_pretrained(tmp_path / "base")
    (said,) = ranks(1).run(loads_too_late, f"{tmp_path}/base")
    assert "use_dora=True" in said
    assert "before get_peft_model" in said
