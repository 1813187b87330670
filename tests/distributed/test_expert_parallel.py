# SPDX-License-Identifier: Apache-2.0
"""AutoEP through a Trainer: the same losses, the layers really replaced, errors before anything is trained."""

from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.topology import Topology
from tests.fits import Language, Sentences, fit
from tests.models import build_glm, tiny_glm

STEPS = 4


def losses(expert_parallel_size: int | None, nested: bool) -> dict[str, Any]:
    config = tiny_glm(n_routed_experts=4)
    model: torch.nn.Module = build_glm(config, seed=5)
    if nested:
        model = torch.nn.ModuleDict({"one": torch.nn.ModuleDict({"deeper": model})})

    class Module(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            held = self.some_odd_name
            loss = (held["one"]["deeper"] if nested else held)(**batch, use_cache=False).loss
            self.losses.append(loss.item())
            return loss

    module = Module(model)
    strategy = Zero3FastStrategy(expert_parallel_size=expert_parallel_size)
    trainer = fit(module, Sentences(config.vocab_size), strategy, steps=STEPS)
    layers = [m for m in trainer.strategy.model.modules() if getattr(m, "_is_autoep_layer", False)]
    return {
        "losses": module.losses,
        "replaced": len(layers),
        "local_experts": sorted({layer.experts.w1.ds_shape[0] for layer in layers}),
        "optimizer": type(trainer.strategy.model.optimizer).__name__,
        "moe_layers": config.num_hidden_layers - config.first_k_dense_replace,
    }


@pytest.mark.parametrize("nested", [False, True], ids=["attribute", "nested"])
@pytest.mark.parametrize("size", [1, 2])
def test_losses_equal_the_run_without_expert_parallelism(ranks, size, nested):
    plain = ranks(2).run(losses, None, nested)
    expert_parallel = ranks(2).run(losses, size, nested)
    for without, with_it in zip(plain, expert_parallel, strict=True):
        assert without["replaced"] == 0
        assert with_it["replaced"] == with_it["moe_layers"] > 0
        assert with_it["local_experts"] == [4 // size]
        assert with_it["optimizer"] == "FastStage3Optimizer"
        assert len(with_it["losses"]) == STEPS
        assert with_it["losses"] == pytest.approx(without["losses"], abs=1e-5)
    # The ranks saw different data, so that a rank that only trains on its own experts can't pass.
    assert plain[0]["losses"] != plain[1]["losses"]


def under_another_name(preset: str | None) -> list[float]:
    config = tiny_glm(n_routed_experts=4)
    model = build_glm(config, seed=5)
    # As a user's own architecture would be, with a router that one of DeepSpeed's presets computes.
    model.config.model_type = "somebodys_moe"
    strategy = Zero3FastStrategy(expert_parallel_size=1, expert_parallel_preset=preset)
    module = Language(model)
    if preset is None:
        with pytest.raises(ValueError, match="pass it as expert_parallel_preset"):
            fit(module, Sentences(config.vocab_size), strategy, steps=STEPS)
    else:
        fit(module, Sentences(config.vocab_size), strategy, steps=STEPS)
    return module.losses


def test_a_preset_that_was_asked_for_is_used(ranks):
    assert ranks(1).run(under_another_name, None) == [[]]
    named = ranks(1).run(under_another_name, "deepseek_v3")[0]
    known = ranks(1).run(losses, 1, False)[0]["losses"]
    assert named == known


def rank_lists(size: int) -> tuple[list[int], list[int]]:
    config = tiny_glm(n_routed_experts=4)
    strategy = Zero3FastStrategy(expert_parallel_size=size)
    fit(Language(build_glm(config, seed=5)), Sentences(config.vocab_size), strategy, steps=1)
    from deepspeed.utils import groups

    name = f"ep_size_{size}"
    ranks_of = torch.distributed.get_process_group_ranks
    return (
        ranks_of(groups._get_expert_parallel_group(name)),
        ranks_of(groups._get_expert_data_parallel_group(name)),
    )


@pytest.mark.parametrize("size", [1, 2])
def test_topology_is_where_deepspeed_puts_the_ranks(ranks, size):
    layout = Topology(world_size=2, expert_parallel_size=size)
    for rank, (expert_parallel, expert_data_parallel) in enumerate(ranks(2).run(rank_lists, size)):
        assert tuple(expert_parallel) == layout.expert_parallel_ranks(rank)
        assert tuple(expert_data_parallel) == layout.expert_data_parallel_ranks(rank)
