# SPDX-License-Identifier: Apache-2.0
"""AutoTP through a Trainer: where ranks sit, what is reported, what stays of an engine, what is refused."""

from typing import Any

import pytest
import torch
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe import tensor_parallel
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology
from tests.fits import Language, Pairs, Regression, Sentences, fit
from tests.models import FAMILIES, build, tiny
from tests.parity import Observed, batch_of


def trained(family: str, steps: int = 1, lane: int = 0, **options: Any) -> Any:
    return fit(Observed(build(tiny(family)), batch_of(lane)), Sentences(64), Zero3FastStrategy(**options), steps=steps)


def layout_seen(tensor: int, experts: int | None) -> dict[str, Any]:
    from deepspeed.utils import groups

    engine = trained("glm", tensor_parallel_size=tensor, expert_parallel_size=experts).strategy.model
    members = torch.distributed.get_process_group_ranks
    return {
        "tensor": tuple(members(groups.get_tensor_model_parallel_group())),
        "data": tuple(members(groups.get_data_parallel_group())),
        "experts": tuple(members(groups._get_expert_parallel_group(f"ep_size_{experts}"))) if experts else None,
        "batch": engine.train_batch_size(),
        "samples": engine.global_samples,
        "layers": tensor_parallel.sharded_layers(engine.module),
        "check": engine.first_dataloader_check.id in engine.module._forward_pre_hooks,
    }


@pytest.mark.parametrize(("world_size", "experts"), [(2, None), (2, 2), (4, 2)])
def test_ranks_sit_where_the_topology_says_and_batches_are_counted_once(ranks, world_size, experts):
    layout = Topology(world_size, experts or 1, 2)
    for rank, seen in enumerate(ranks(world_size).run(layout_seen, 2, experts)):
        assert seen["tensor"] == layout.tensor_parallel_ranks(rank)
        assert seen["data"] == layout.data_parallel_ranks(rank)
        assert seen["experts"] == (layout.expert_parallel_ranks(rank) if experts else None)
        # Each data-parallel rank has 2 samples; DeepSpeed counts every rank.
        assert seen["batch"] == seen["samples"] == 2 * layout.data_parallel_size
        # 3 attentions of 4 projections, 3 dense or shared layers of 3.
        assert seen["layers"] == 21
        assert not seen["check"]


def losses(strategy: Any) -> list[float]:
    return fit(Regression(), Pairs(), strategy, steps=2).lightning_module.losses


def without_after_with(mended: bool) -> str:
    before = losses("zero3_fast")
    trained("mixtral", tensor_parallel_size=2)
    if mended:
        assert losses("zero3_fast") == before
        trained("mixtral", tensor_parallel_size=2)
        return "went on"
    with substituted(tensor_parallel, "forget_other_layouts", lambda _: None), pytest.raises(AttributeError) as caught:
        losses("zero3_fast")
    tensor_parallel.forget_other_layouts(1)
    return str(caught.value)


def test_an_engine_without_tensor_parallelism_after_one_with_it(ranks):
    assert ranks(2).run(without_after_with, True) == ["went on"] * 2
    assert "get_model_parallel_rank" in ranks(2).run(without_after_with, False)[0]


def built_in_partitions(family: str, options: dict[str, Any], precision: str) -> tuple[float, float]:
    """The first loss of a model built in configure_model, and that of the same model built whole by Transformers."""
    config, model_class = tiny(family), FAMILIES[family][1]
    batch = batch_of(torch.distributed.get_rank() // options["tensor_parallel_size"])

    class Later(Language):
        def configure_model(self) -> None:
            if self.some_odd_name is None:
                torch.manual_seed(3)
                self.some_odd_name = build_from_config(model_class, config)

        def training_step(self, _: Any, batch_idx: int) -> torch.Tensor:
            loss = self.some_odd_name(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

    module = Later(None)
    fit(module, Sentences(64), Zero3FastStrategy(**options), steps=1, precision=precision)
    torch.manual_seed(3)
    whole = build_from_config(model_class, config)
    if precision != "32-true":
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        return module.losses[0], whole(input_ids=batch, labels=batch).loss.item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tensor", "experts", "precision", "bound"),
    [
        (2, None, "32-true", 1e-6),
        (2, 2, "32-true", 1e-6),
        (1, 2, "bf16-mixed", 5e-3),
        # Each rank rounds its part of a sum.
        (2, None, "bf16-mixed", 1e-2),
        (2, 2, "bf16-mixed", 1e-2),
    ],
)
def test_a_model_built_in_partitions_is_the_one_that_seed_gives(ranks, family, tensor, experts, precision, bound):
    if family == "minimax" and experts and "minimax_m3" not in available_preset_names():
        pytest.skip("the installed DeepSpeed has no preset for it")
    options = {"tensor_parallel_size": tensor, "expert_parallel_size": experts}
    # GLM's routers are computed in fp32 by both, and all else as well in the same way.
    bound = 1e-6 if family == "glm" and tensor == 1 else bound
    for ours, theirs in ranks(2).run(built_in_partitions, family, options, precision):
        assert ours == pytest.approx(theirs, rel=bound)
