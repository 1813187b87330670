# SPDX-License-Identifier: Apache-2.0
"""Plans at true scale have the reports' counts; plans of tiny models have what a real run holds."""

from __future__ import annotations

import functools
import tempfile
from typing import Any, get_args

import pytest

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.config import SetupError, Switch
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.plan.child import Found, Job, find_all, find_structure
from lightning_zero3.plan.extract import structure_of
from lightning_zero3.plan.memory import GIB
from lightning_zero3.plan.report import assemble
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.structure import Structure
from tests.fits import Language, Sentences, fit, optimizer_of
from tests.models import FAMILIES, tiny

BUCKET, THRESHOLD = 100_000, 100
STOCK = dict.fromkeys(get_args(Switch), False)


SIZES = {"reduce_bucket_size": BUCKET, "persistence_threshold": THRESHOLD, "sub_group_size": 10_000}


def setup_of(family: str, folder: str, **options: Any) -> Setup:
    return Setup(model=folder, precision="32-true", **SIZES, **options)


@functools.cache
def by_default() -> dict[str, Structure]:
    """What the tests that aren't slow need, all in one process: importing takes longer than planning."""
    setups = {name: Setup(**options) for name, (options, _) in (REPORTS | MINIMAX).items() if name in DEFAULT}
    with tempfile.TemporaryDirectory() as folder:
        for family in ("glm", "qwen3_5"):
            tiny(family).save_pretrained(f"{folder}/{family}")
            setups[family] = setup_of(family, f"{folder}/{family}", devices=2, expert_parallel_size=2)
        found = find_all([Job(setup=setup) for setup in setups.values()])
    return {name: each.structure for name, each in zip(setups, found, strict=True) if isinstance(each, Found)}


def planned(family: str, **options: Any) -> Structure:
    """The plan of a tiny model, from a folder with its config."""
    if options == {"devices": 2, "expert_parallel_size": 2}:
        return by_default()[family]
    with tempfile.TemporaryDirectory() as folder:
        tiny(family).save_pretrained(folder)
        return find_structure(setup_of(family, folder, **options))


def reported(name: str) -> tuple[Setup, Structure, tuple[int, ...]]:
    options, expected = (REPORTS | MINIMAX)[name]
    setup = Setup(**options)
    return setup, by_default()[name] if name in DEFAULT else find_structure(setup), expected


def lacks_preset(name: str) -> bool:
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names

    return name not in available_preset_names()


REPORTS: dict[str, Any] = {
    "GLM-4.5-Air, 4 layers": (
        {"recipe": "glm45air", "layers": 4, "nodes": 4, "expert_parallel_size": 8},
        (8_509_550_592, 11, 63, 265_923_456),
    ),
    "Qwen3.5, 26 layers": (
        {"recipe": "qwen35", "layers": 26, "nodes": 4, "expert_parallel_size": 32},
        (172_909_400_064, 41, 479, 5_403_418_752),
    ),
}
MINIMAX: dict[str, Any] = {
    "MiniMax-M3, 4 layers": (
        {"recipe": "minimax_m3", "layers": 4, "devices": 2, "expert_parallel_size": 2, "bf16_masters": True},
        (10_874_838_272, 6, 51, 5_437_419_136),
    ),
    "MiniMax-M3": (
        {
            "recipe": "minimax_m3",
            "nodes": 4,
            "expert_parallel_size": 8,
            "tensor_parallel_size": 4,
            "bf16_masters": True,
        },
        (426_174_565_632, 173, 1_059, 13_322_157_672),
    ),
}

DEFAULT = ("Qwen3.5, 26 layers", "MiniMax-M3, 4 layers")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) for each in ("GLM-4.5-Air, 4 layers", "Qwen3.5, 26 layers")]
)
def test_the_reports_counts(name):
    _, found, expected = reported(name)
    seen = (found.model_parameters, len(found.sub_groups), len(found.trained), found.elements_per_rank)
    assert seen == expected
    # The masters are fp32, so the alias has nothing to save.
    assert (found.dtypes.weights, found.dtypes.masters) == ("bf16", "fp32")
    assert not found.aliased
    assert found.second_copy_bytes == 0
    assert found.masters_bytes == 4 * found.elements_per_rank
    if name.startswith("Qwen"):
        assert found.gradient_clear_visits_per_sub_group == 19_639


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MiniMax-M3, 4 layers", "MiniMax-M3"])
def test_the_reports_second_copy(name):
    if lacks_preset("minimax_m3"):
        pytest.skip("this DeepSpeed has no preset for MiniMax-M3")
    setup, found, expected = reported(name)
    seen = (found.model_parameters, len(found.sub_groups), len(found.trained), found.elements_per_rank)
    assert seen == expected
    assert found.aliased
    report = assemble(name, setup, found)
    assert report["second_copy_gib"] == pytest.approx(10.128 if "4" in name else 24.814, abs=5e-4)
    assert report["second_copy_gib"] == 2 * found.elements_per_rank / GIB


class Built(Language):
    """A tiny model, built where the recipes build theirs."""

    def __init__(self, family: str) -> None:
        super().__init__(None)
        self.family = family

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self.some_odd_name = build_from_config(FAMILIES[self.family][1], tiny(self.family))


def trained(family: str, expert_parallel_size: int, stock: bool) -> dict[str, Any]:
    """What a rank of a real run holds, and what its second step does."""
    module = Built(family)
    strategy = Zero3FastStrategy(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": THRESHOLD,
                "sub_group_size": 10_000,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
        expert_parallel_size=expert_parallel_size,
        **(STOCK if stock else {}),
    )

    def count(*_: Any) -> None:
        strategy.model.optimizer.start_collective_census()
        strategy.model.optimizer.start_grad_clear_census()

    module.on_train_batch_start = count  # type: ignore[method-assign]
    optimizer = optimizer_of(fit(module, Sentences(64), strategy, steps=2))
    return {
        "structure": structure_of(module, optimizer, model_parameters=0).to_json(),
        "collectives": optimizer.step_collectives,
        "visits": optimizer.grad_clear_census.visits,
    }


def comparable(structure: dict[str, Any]) -> dict[str, Any]:
    """Without what a run doesn't know, and without the name of the module that holds the model."""
    parameters = [{**p, "name": p["name"].partition(".")[2]} for p in structure["parameters"]]
    return {**structure, "parameters": parameters, "model_parameters": None}


@pytest.mark.parametrize(
    ("family", "world"),
    [("glm", 2), *(pytest.param(f, w, marks=pytest.mark.slow) for f, w in (("qwen3_5", 2), ("glm", 1)))],
)
def test_a_real_run_holds_what_is_planned(ranks, family, world):
    plan = planned(family, devices=world, expert_parallel_size=world)
    for seen in ranks(world).run(trained, family, world, False):
        assert comparable(seen["structure"]) == comparable(plan.to_json())
        assert seen["collectives"] == plan.collectives_ours.total
        assert seen["visits"] == plan.gradient_clear_visits_ours


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stock_step_launches_and_visits_what_is_planned(ranks, world):
    plan = planned("glm", devices=world, expert_parallel_size=world)
    for seen in ranks(world).run(trained, "glm", world, True):
        assert seen["collectives"] == plan.collectives_stock.total
        assert seen["visits"] == plan.gradient_clear_visits_stock


@pytest.mark.slow
def test_a_cap_on_groups_of_experts_is_of_the_plan_alone():
    sizes = {"devices": 2, "expert_parallel_size": 2}
    as_it_is, capped = planned("glm", **sizes), planned("glm", **sizes, max_group_size=1)
    # Without a cap that matters all experts are one group; with this one each of 2 × 3 tensors is alone.
    assert capped.optimizer_groups - as_it_is.optimizer_groups == 2 * 3 - 1
    setup = Setup(model="any", **sizes, max_group_size=1)
    report = assemble("tiny", setup, capped, as_it_is)
    assert report["as_deepspeed_is"]["sub_groups"] == len(as_it_is.sub_groups)
    assert (
        f"{len(capped.sub_groups)} sub-groups instead of {len(as_it_is.sub_groups)}"
        in (report["max_group_size_means"]["checkpoint"])
    )


@pytest.mark.slow
def test_what_training_refuses_is_refused_with_its_words(tmp_path):
    tiny("glm").save_pretrained(tmp_path)
    with pytest.raises(SetupError, match="doesn't divide the 8 experts"):
        find_structure(Setup(model=str(tmp_path), devices=16, expert_parallel_size=16))
