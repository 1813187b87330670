# SPDX-License-Identifier: Apache-2.0
"""Models built in ``configure_model``: partitioned from the start, with the values of a whole one."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import Glm4MoeForCausalLM

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.substitution import substituted
from tests.fits import Language, Sentences, fit
from tests.models import tiny_glm


class BuiltSmall(Language):
    def __init__(self, reference: dict[str, torch.Tensor]) -> None:
        super().__init__(None)
        self.config = tiny_glm(n_routed_experts=4)
        self.reference = reference
        self.different: list[str] = []
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        import deepspeed

        if self.some_odd_name is not None:
            return
        torch.manual_seed(5)
        model = build_from_config(Glm4MoeForCausalLM, self.config)
        self.partitioned = [hasattr(p, "ds_tensor") and p.numel() == 0 for p in model.parameters()]
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                if value.dtype != self.reference[name].dtype or not torch.equal(value, self.reference[name]):
                    self.different.append(name)
        self.some_odd_name = model


def whole_model(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(5)
        model = build_from_config(Glm4MoeForCausalLM, tiny_glm(n_routed_experts=4))
    finally:
        torch.set_default_dtype(default)
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def built(precision: str, dtype: torch.dtype, expert_parallel_size: int | None) -> dict[str, Any]:
    reference = whole_model(dtype)
    module = BuiltSmall(reference)
    strategy = Zero3FastStrategy(expert_parallel_size=expert_parallel_size)
    fit(module, Sentences(module.config.vocab_size), strategy, steps=2, precision=precision)
    spread = reference["model.embed_tokens.weight"].float().std().item()
    buffers = {name: value.dtype for name, value in reference.items() if "inv_freq" in name or "bias" in name}
    return {
        "different": module.different,
        "partitioned": module.partitioned,
        "losses": module.losses,
        "spread": spread,
        "inv_freq": {dtype for name, dtype in buffers.items() if "inv_freq" in name},
    }


@pytest.mark.parametrize("size", [None, 2])
def test_a_model_built_in_partitions_has_the_values_of_a_whole_one(ranks, size):
    for seen in ranks(2).run(built, "32-true", torch.float32, size):
        assert seen["partitioned"]
        assert all(seen["partitioned"])
        assert seen["different"] == []
        assert seen["spread"] == pytest.approx(tiny_glm().initializer_range, rel=0.2)
        assert all(0 < loss < 10 for loss in seen["losses"])


def test_buffers_are_not_rounded_by_a_bf16_build(ranks):
    for seen in ranks(2).run(built, "bf16-mixed", torch.bfloat16, 2):
        # Routers are kept in fp32 by Transformers in a whole model; zero.Init makes one dtype of all weights.
        assert [name for name in seen["different"] if not name.endswith("mlp.gate.weight")] == []
        assert seen["inv_freq"] == {torch.float32}
        assert all(0 < loss < 10 for loss in seen["losses"])


class Tied(BuiltSmall):
    def __init__(self, reference: dict[str, torch.Tensor]) -> None:
        super().__init__(reference)
        self.config = tiny_glm(n_routed_experts=4, tie_word_embeddings=True)


def tied() -> tuple[bool, list[float]]:
    module = Tied({})
    module.reference = {}
    torch.manual_seed(5)
    whole = build_from_config(Glm4MoeForCausalLM, module.config)
    module.reference = {n: v.detach() for n, v in [*whole.named_parameters(), *whole.named_buffers()]}
    fit(module, Sentences(module.config.vocab_size), Zero3FastStrategy(), steps=2)
    assert module.different == []
    model = module.some_odd_name
    return model.lm_head.weight is model.model.embed_tokens.weight, module.losses


def test_tied_weights_stay_tied(ranks):
    for same, losses in ranks(2).run(tied):
        assert same
        assert all(0 < loss < 10 for loss in losses)


def biases(by_constructor: bool) -> list[float]:
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

    upstream = Glm4MoePreTrainedModel._init_weights

    def with_random_biases(self: Any, module: torch.nn.Module) -> None:
        """Values that only the rank that initialises them has."""
        upstream(self, module)
        if hasattr(module, "e_score_correction_bias"):
            bias = module.e_score_correction_bias
            bias.copy_(torch.arange(1.0, 1.0 + bias.numel()) * (1 + torch.distributed.get_rank()))

    class Module(BuiltSmall):
        def configure_model(self) -> None:
            if self.some_odd_name is None:
                with substituted(Glm4MoePreTrainedModel, "_init_weights", with_random_biases):
                    builds = Glm4MoeForCausalLM if by_constructor else partial(build_from_config, Glm4MoeForCausalLM)
                    self.some_odd_name = builds(self.config)

    module = Module({})
    fit(module, Sentences(module.config.vocab_size), Zero3FastStrategy(), steps=1)
    return module.some_odd_name.model.layers[1].mlp.gate.e_score_correction_bias.tolist()


@pytest.mark.parametrize("by_constructor", [False, True])
def test_buffers_that_one_rank_initialises_are_the_same_on_all(ranks, by_constructor):
    first, second = ranks(2).run(biases, by_constructor)
    assert first == second == [1.0, 2.0, 3.0, 4.0]
