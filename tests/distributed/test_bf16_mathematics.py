# SPDX-License-Identifier: Apache-2.0
"""In bf16 AutoEP's layers are no further from the fp32 result than Transformers' own layers in bf16 are.

Rounding leaves nothing exact, so both are compared with what plain Transformers computes in fp32 from fp32 weights.
Each tensor may be twice as far from it as Transformers' own bf16 result, or one rounding to bf16; gradients differ
by the order of sums. Logits, which nothing but layers and routers decide, may differ from Transformers' own by a tenth
of its own error. Qwen's routers round their weights to bf16, AutoEP's don't, so there it is the whole of it.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import distributed, nn

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe import expert_parallel, verify
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology
from tests.distributed.test_same_mathematics import WITH_AUXILIARY_LOSS, needs_its_preset
from tests.fits import Sentences, fit
from tests.models import FAMILIES, build, tiny
from tests.parity import Observed, batch_of

TIMES_THEIRS = 2.0
ONE_ROUNDING = 2.0**-8
_preset_exists = needs_its_preset


def model_of(family: str) -> nn.Module:
    model = build(tiny(family))
    if family == "glm":
        # Logits of about -35, which bf16 tells apart by quarters; their differences decide the experts' weights.
        with torch.no_grad():
            model.get_input_embeddings().weight[:, 0] = 6.0
            for name, parameter in model.named_parameters():
                if name.endswith(".post_attention_layernorm.weight"):
                    parameter[0] = 1.0
                if name.endswith(".mlp.gate.weight"):
                    parameter.mul_(2.0)[:, 0] = -6.5
    return model


def errors(family: str, as_upstream: bool = False) -> dict[str, dict[str, float]]:
    """Relative distances: ours from the fp32 result, Transformers' from it, ours from Transformers'."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    layout = Topology(world, world)
    arguments = {"output_router_logits": True} if family in WITH_AUXILIARY_LOSS else {}
    module = Observed(model_of(family), batch_of(rank), **arguments)
    with substituted(expert_parallel, "routers_in_fp32", lambda *_: []) if as_upstream else nullcontext():
        fit(module, Sentences(64), Zero3FastStrategy(expert_parallel_size=world), steps=1, precision="bf16-mixed")
    batches = [batch_of(lane) for lane in range(world)]
    exact = verify.plain(model_of(family), batches, world, rank, **arguments)
    rounded = model_of(family)
    for parameter in rounded.parameters():  # as DeepSpeed casts a model; buffers keep their digits
        parameter.data = parameter.data.bfloat16()
    ours, theirs = module.seen, verify.plain(rounded, batches, world, rank, **arguments)
    mine = verify.as_transformers_names(ours, theirs)
    parts = {name: verify.part_of(name, value, mine[name].shape, layout, rank) for name, value in theirs.items()}
    return {
        "ours": verify.relative_errors(ours, exact, layout, rank),
        "theirs": verify.relative_errors({n: part.float() for n, part in parts.items()}, exact, layout, rank),
        "apart": verify.relative_errors(ours, theirs, layout, rank),
    }


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_near_to_the_fp32_result_as_transformers(ranks, family, world):
    for each in ranks(world).run(errors, family):
        allowed = {name: max(TIMES_THEIRS * error, ONE_ROUNDING) for name, error in each["theirs"].items()}
        assert {n: e for n, e in each["ours"].items() if e > allowed[n]} == {}
        share = 1.0 if family.startswith("qwen") else 0.1
        assert each["apart"]["logits"] <= share * each["theirs"]["logits"]
        assert each["theirs"]["logits"] > ONE_ROUNDING  # or nothing was rounded


@pytest.mark.parametrize("world", [1, 2])
def test_a_router_in_bf16_is_seen(ranks, world):
    for each in ranks(world).run(errors, "glm", True):
        assert each["apart"]["logits"] > 2 * 0.1 * each["theirs"]["logits"]
