# SPDX-License-Identifier: Apache-2.0
"""``verify_parallel``: passes for what is right, raises on all ranks for what isn't, and leaves no trace."""

from __future__ import annotations

import gc
import logging
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import distributed, nn

from lightning_zero3 import Zero3FastStrategy, verify_parallel
from lightning_zero3.moe import expert_parallel, scaled_down, tensor_parallel
from lightning_zero3.substitution import substituted
from tests.distributed.test_same_mathematics import TRAPS, fixed, needs_its_preset
from tests.fits import Language, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import COMPOSITES, FAMILIES, build, tiny, tiny_composite

_preset_exists = needs_its_preset
EP1, EP2, TP2 = {"expert_parallel_size": 1}, {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}
BOTH = {**EP2, **TP2}


class Lines(logging.Handler):
    """What the check has said on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "verify_parallel" in record.getMessage():
            self.lines.append(record.getMessage())


class BuiltLater(Language):
    def __init__(self, family: str) -> None:
        super().__init__(None)
        self.family = family

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self.some_odd_name = FAMILIES[self.family][1](tiny(self.family))


TRAPS_OF_ITS_OWN = {
    "bf16 router": lambda: substituted(expert_parallel, "routers_in_fp32", lambda *_: []),
    "peers that start differently": lambda: substituted(tensor_parallel, "start_alike", lambda _: None),
}


def verified(
    family: str, options: dict[str, Any], trap: str | None = None, module: Any = None, **trainer: Any
) -> list[str]:
    """Fit a step; the lines that the check has logged, or its error."""
    module = module or Language(build(tiny(family)))
    # Lightning's, or pytorch_lightning's once that has been imported in this process.
    lines, logger = Lines(), rank_zero.log
    logger.addHandler(lines)
    try:
        with {**TRAPS, **TRAPS_OF_ITS_OWN}[trap]() if trap else nullcontext():
            fit(module, Sentences(64), Zero3FastStrategy(verify_parallel=True, **options), steps=1, **trainer)
    except verify_parallel.DifferentMathematicsError as error:
        assert not module.losses
        return [str(error)]
    finally:
        logger.removeHandler(lines)
    assert len(module.losses) == 1
    return lines.lines


def assert_passed(every_ranks: list[list[str]]) -> None:
    first, *others = every_ranks
    assert len(first) == 1
    assert "computes what plain Transformers computes" in first[0]
    assert others == [[]] * len(others)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(ranks, family):
    assert_passed(ranks(1).run(verified, family, EP1))


def in_bf16(family: str, options: dict[str, Any], trap: str | None = None) -> list[str]:
    return verified(family, options, trap, precision="bf16-mixed")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "glm" else pytest.mark.slow) for family in FAMILIES]
)
def test_every_family_passes_in_bf16(ranks, family):
    assert_passed(ranks(1).run(in_bf16, family, EP1))


CASES = [("glm", EP2), ("qwen3_5", TP2), ("minimax", BOTH)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(family, options, marks=() if (family, options) in CASES else pytest.mark.slow)
        for family in FAMILIES
        for options in (EP2, TP2, BOTH)
    ],
)
def test_two_ranks_pass(ranks, family, options):
    assert_passed(ranks(2).run(verified, family, options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"expert_parallel_size": 4}, TP2, BOTH, {**TP2, "expert_parallel_size": 4}])
@pytest.mark.parametrize("family", ["glm", "qwen3_5"])
def test_four_ranks_pass(ranks, family, options):
    assert_passed(ranks(4).run(verified, family, options))


def built_later(family: str, options: dict[str, Any]) -> list[str]:
    return verified(family, options, module=BuiltLater(family))


@pytest.mark.parametrize("options", [EP2, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_a_model_that_is_partitioned_while_it_is_built_passes(ranks, options):
    assert_passed(ranks(2).run(built_later, "glm", options))


def text_and_vision(family: str, options: dict[str, Any]) -> list[str]:
    return verified(family, options, module=Language(build(tiny_composite(family))))


@pytest.mark.parametrize("family", COMPOSITES)
def test_the_text_model_of_a_composite_passes(ranks, family):
    assert_passed(ranks(1).run(text_and_vision, family, EP1))


def with_its_own_optimizer(config: dict[str, Any]) -> list[str]:
    return verified("glm", {"config": {"zero_optimization": {"stage": 3}, **config}, **EP1})


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        {"gradient_clipping": 0.1, "wall_clock_breakdown": True, "train_batch_size": 2},
    ],
    ids=["optimizer", "offload", "others"],
)
def test_the_runs_own_config_is_used(ranks, config):
    assert_passed(ranks(1).run(with_its_own_optimizer, config))


@pytest.mark.parametrize(
    ("family", "options", "trap", "named"),
    [
        ("glm", fixed("routed_scaling_factor", 1.0), None, "expert_parallel.routed_scaling_factor=1.0"),
        ("glm", EP1, "a generic softmax preset", "d model.layers"),
        ("qwen3_5", EP1, "probabilities in the auxiliary loss", "aux_loss"),
        ("qwen3", TP2, "gradients of heads' norms not summed", "d model.layers.0.self_attn.q_norm.weight"),
        ("glm", TP2, "peers that start differently", "tensors differ"),
    ],
    ids=["scaling lost", "softmax", "probabilities", "norms", "start"],
)
def test_a_trap_left_open_ends_the_run_on_all_ranks(ranks, family, options, trap, named):
    messages = ranks(options.get("tensor_parallel_size", 1)).run(verified, family, options, trap)
    for (message,) in messages:
        assert "would train another function" in message
        assert named in message
    assert len(set(map(tuple, messages))) == 1


def test_a_router_in_bf16_ends_a_bf16_run(ranks):
    for (message,) in ranks(2).run(in_bf16, "glm", EP2, "bf16 router"):
        assert "routing of model.layers.1.mlp in torch.bfloat16" in message


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


def left_behind(options: dict[str, Any]) -> None:
    """Run the check again and again; only the first may leave what is made once per process."""
    from deepspeed.utils import groups

    seen: list[tuple[Any, ...]] = []
    check = verify_parallel.verify_parallel

    def live() -> tuple[int, int]:
        gc.collect()
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided and not each.is_meta
        }
        known = distributed.distributed_c10d._world.pg_map
        return sum(storages.values()), len(known)

    def watched(*arguments: Any, **named: Any) -> None:
        made = {name: str(value) for name, value in vars(groups).items() if name.startswith("_") and name.isupper()}
        for _ in range(3):
            random.seed(1)
            np.random.seed(2)
            torch.manual_seed(3 + distributed.get_rank())
            before = states()
            check(*arguments, **named)
            assert states() == before
            seen.append(live())
        assert {name: str(value) for name, value in vars(groups).items() if name in made} == made

    gc.unfreeze()
    with substituted(verify_parallel, "verify_parallel", watched):
        fit(Language(build(tiny("glm"))), Sentences(64), Zero3FastStrategy(verify_parallel=True, **options), steps=1)
    # Of a megabyte.
    assert seen[2][0] - seen[1][0] < 1000, seen
    assert seen[2][1] == seen[1][1], seen


@pytest.mark.slow
@pytest.mark.parametrize("options", [EP2, TP2], ids=str)
def test_memory_groups_and_random_states_are_left_as_they_were(ranks, options):
    ranks(2).run(left_behind, options)


def same_run(options: dict[str, Any], precision: str) -> None:
    runs = []
    for check in (False, True):
        torch.manual_seed(5 + distributed.get_rank())
        module = Language(build(tiny("glm", attention_dropout=0.1)))
        strategy = Zero3FastStrategy(verify_parallel=check, **options)
        trainer = fit(module, Sentences(64), strategy, steps=3, precision=precision)
        runs.append((module.losses, tensors_of(optimizer_of(trainer))))
    assert runs[0][0] == runs[1][0]
    assert_equal_bits(runs[0][1], runs[1][1])


@pytest.mark.parametrize(("options", "precision"), [(EP2, "bf16-mixed"), (BOTH, "32-true")])
def test_the_run_has_the_same_bits_with_and_without(ranks, options, precision):
    ranks(2).run(same_run, options, precision)


class Patched(nn.Linear):
    """A layer that the model's config doesn't know."""


def unscalable() -> str:
    model = build(tiny("glm"))
    model.model.layers[1].self_attn.o_proj = Patched(64, 32, bias=False)
    with pytest.raises(scaled_down.UnscalableModelError) as caught:
        verified("glm", EP1, module=Language(model))
    return str(caught.value)


def test_a_model_that_its_config_does_not_build_is_no_false_pass(ranks):
    (message,) = ranks(1).run(unscalable)
    assert "Layer 1 of Glm4MoeForCausalLM (model_type='glm4_moe') can't be built from its config" in message
    assert "self_attn.o_proj" in message
    assert "leave verify_parallel out" in message
