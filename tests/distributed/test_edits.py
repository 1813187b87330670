# SPDX-License-Identifier: Apache-2.0
"""What a user writes into weights, gathered or through DeepSpeed's setters, is what the next step starts from."""

from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3Options
from tests.engines import PRECISIONS, Trainable, batch_of, build, micro_step
from tests.fits import assert_equal_bits, tensors_of

CASES = [*PRECISIONS, "autocast without the alias", "optimizer on the CPU"]
HUGE = 10_000_000


def engine_of(case: str, persistence: int = 20, **more: Any) -> Any:
    zero = {"stage3_param_persistence_threshold": persistence, **more.pop("zero", {})}
    if case == "optimizer on the CPU":
        return build(zero={**zero, "offload_optimizer": {"device": "cpu"}}, bf16={"enabled": True}, **more)
    if case == "autocast without the alias":
        more["options"] = Zero3Options(alias_master_weights=False)
        case = "autocast"
    return build(zero=zero, **PRECISIONS[case], **more)


def plain_sgd(model: torch.nn.Module) -> Any:
    # Without momentum and with a rate of zero a step writes masters to weights and changes nothing else.
    return torch.optim.SGD(model.parameters(), lr=0.0)


def engine_that_stands_still(case: str, persistence: int, **more: Any) -> Any:
    model = Trainable()
    if case == "optimizer on the CPU":
        more["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    else:
        more["optimizer"] = plain_sgd(model)
    return engine_of(case, persistence, model=model, **more)


def full(parameter: Any) -> torch.Tensor:
    """The weight as a forward would see it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def weights_and_masters(engine: Any) -> dict[str, list[torch.Tensor]]:
    # Plain SGD has no moments.
    return {kind: tensors for kind, tensors in tensors_of(engine.optimizer).items() if kind != "moments"}


def master_of(parameter: Any) -> torch.Tensor:
    import deepspeed

    return deepspeed.utils.safe_get_full_fp32_param(parameter)


def gathered_edit(case: str, persistence: int) -> None:
    import deepspeed

    engine = engine_that_stands_still(case, persistence)
    micro_step(engine, 0)
    parameters = list(engine.module.parameters())
    masters = [master_of(p).clone() for p in parameters]
    edited = parameters[0]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            # One element by .data, one in place; the others stay.
            edited.data.view(-1)[-1] = 0.5
            with torch.no_grad():
                edited[0, 0] = -2.25
    for _ in range(2):
        for parameter, before in zip(parameters, masters, strict=True):
            now = master_of(parameter)
            if parameter is edited:
                assert now.view(-1)[-1] == 0.5
                assert now[0, 0] == -2.25
                rest = torch.ones_like(now, dtype=torch.bool)
                rest.view(-1)[-1] = rest[0, 0] = False
                assert torch.equal(now[rest], before[rest])
            else:
                assert torch.equal(now, before)
            assert torch.equal(full(parameter), now.to(parameter.dtype))
        micro_step(engine, 1)


@pytest.mark.parametrize("persistence", [0, HUGE])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_an_edit_survives_steps_and_everything_else_keeps_its_bits(ranks, world_size, case, persistence):
    ranks(world_size).run(gathered_edit, case, persistence)


def gathered_by_a_forward(case: str) -> None:
    """Autocast's forward gathers in 16 bits; what it has gathered must not be written back."""
    import deepspeed

    engine = engine_that_stands_still(case, HUGE)
    parameters = list(engine.module.parameters())
    masters = [master_of(p).clone() for p in parameters]
    for step in range(3):
        micro_step(engine, step)
    # A context gives persistent parameters up; the next forward gathers them, and leaves them lying there.
    with deepspeed.zero.GatheredParameters(parameters):
        pass
    with torch.no_grad():
        engine(batch_of(engine, 0), 0)
    assert all(p.data.numel() == p.ds_numel for p in parameters)
    if torch.distributed.get_world_size() > 1:
        assert all(torch.equal(p.data, p.data.to(torch.bfloat16).to(p.dtype)) for p in parameters)
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        pass
    for parameter, before in zip(parameters, masters, strict=True):
        assert torch.equal(master_of(parameter), before)
    micro_step(engine, 3)
    for parameter, before in zip(parameters, masters, strict=True):
        assert torch.equal(master_of(parameter), before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", ["autocast", "autocast without the alias", "bf16 with fp32 masters"])
def test_weights_that_a_forward_gathered_in_16_bits_are_not_written_back(ranks, world_size, case):
    ranks(world_size).run(gathered_by_a_forward, case)


def without_modifier_rank(case: str) -> str:
    import deepspeed

    from lightning_zero3.optimizer.edits import LostEditError

    engine = engine_that_stands_still(case, 0)
    micro_step(engine, 0)
    parameters = list(engine.module.parameters())
    before = weights_and_masters(engine)
    with deepspeed.zero.GatheredParameters(parameters):
        assert all(p.numel() == p.ds_numel for p in parameters)  # only read
    edited = parameters[0]
    if torch.distributed.get_world_size() == 1:
        with deepspeed.zero.GatheredParameters([edited]):
            edited.data[0, 0] = 0.5
        micro_step(engine, 1)
        assert master_of(edited)[0, 0] == 0.5
        assert full(edited)[0, 0] == 0.5
        return ""
    with pytest.raises(LostEditError) as caught, deepspeed.zero.GatheredParameters(parameters):
        edited.data.fill_(0.5)
    # Another failure in the context isn't hidden by this one.
    failing = deepspeed.zero.GatheredParameters(parameters)
    with pytest.raises(KeyError), failing:  # noqa: PT012
        edited.data.fill_(0.5)
        {}["no such value"]
    assert_equal_bits(before, weights_and_masters(engine))
    micro_step(engine, 1)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", ["fp32", "bf16 with fp32 masters", "autocast"])
def test_an_edit_without_modifier_rank_is_kept_by_one_rank_and_refused_by_more(ranks, world_size, case):
    for message in ranks(world_size).run(without_modifier_rank, case):
        if world_size > 1:
            assert "net.0.weight" in message
            assert "modifier_rank=0" in message


def setters(case: str, persistence: int) -> None:
    import deepspeed

    engine = engine_that_stands_still(case, persistence)
    for step in range(2):
        micro_step(engine, step)
        for position, parameter in enumerate(engine.module.parameters()):
            wanted = torch.randn(
                tuple(parameter.ds_shape), generator=torch.Generator().manual_seed(step * 7 + position)
            )
            wanted = wanted.to(torch.bfloat16).float()  # what every precision can hold
            whole = (step + position) % 2
            if whole:
                deepspeed.utils.safe_set_full_fp32_param(parameter, wanted)
            else:
                rank, size = torch.distributed.get_rank(), parameter.partition_numel()
                padded = torch.nn.functional.pad(wanted.flatten(), (0, size * parameter.ds_zero_partition_world_size))
                deepspeed.utils.safe_set_local_fp32_param(parameter, padded[rank * size : (rank + 1) * size])
            gathered = parameter.data.numel() == parameter.ds_numel
            if gathered:
                assert torch.equal(parameter.data.float(), wanted)
            assert torch.equal(master_of(parameter).float(), wanted)
            assert torch.equal(full(parameter).float(), wanted)
            # The stale copy of a persistent parameter must not come back by a gathered edit.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                pass
            assert torch.equal(master_of(parameter).float(), wanted)
        expected = [master_of(p).clone() for p in engine.module.parameters()]
        micro_step(engine, step)
        for parameter, wanted in zip(engine.module.parameters(), expected, strict=True):
            assert torch.equal(master_of(parameter), wanted)


@pytest.mark.parametrize("persistence", [0, HUGE])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_setters_reach_weights_and_gathered_copies_at_once(ranks, world_size, case, persistence):
    ranks(world_size).run(setters, case, persistence)


def setters_in_a_context(modifier_rank: int | None) -> None:
    import deepspeed

    engine = engine_that_stands_still("bf16 with fp32 masters", 20)
    micro_step(engine, 0)
    for position, parameter in enumerate(engine.module.parameters()):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank):
            if position % 2:
                deepspeed.utils.safe_set_local_fp32_param(parameter, torch.full((parameter.partition_numel(),), 0.5))
            else:
                deepspeed.utils.safe_set_full_fp32_param(parameter, torch.full(tuple(parameter.ds_shape), 0.5))
            assert bool((parameter.data == 0.5).all())
    micro_step(engine, 1)
    for parameter in engine.module.parameters():
        assert bool((master_of(parameter) == 0.5).all())
        assert bool((full(parameter) == 0.5).all())


@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("world_size", [1, 2])
def test_setters_inside_a_context(ranks, world_size, modifier_rank):
    ranks(world_size).run(setters_in_a_context, modifier_rank)


def setters_with_secondary_copies() -> None:
    import deepspeed

    engine = build(zero={"zero_hpz_partition_size": torch.distributed.get_world_size()})
    micro_step(engine, 0)
    engine(batch_of(engine, 1), 1)
    layer = engine.module.net[0]
    for whole in (False, True):
        value = 0.25 if whole else 0.5
        if whole:
            deepspeed.utils.safe_set_full_fp32_param(layer.weight, torch.full(tuple(layer.weight.ds_shape), value))
        else:
            size = layer.weight.partition_numel()
            deepspeed.utils.safe_set_local_fp32_param(layer.weight, torch.full((size,), value))
        seen: list[bool] = []
        handle = layer.register_forward_hook(
            lambda module, *_, value=value, seen=seen: seen.append(bool((module.weight == value).all()))
        )
        with torch.no_grad():
            engine(batch_of(engine, 1), 1)
        handle.remove()
        assert seen == [True]


def test_a_forward_sees_what_was_set_with_hpzeros_secondary_copies(ranks):
    ranks(2).run(setters_with_secondary_copies)


def frozen_setters() -> None:
    import deepspeed

    model = Trainable()
    frozen = model.net[2].weight.requires_grad_(False)
    engine = build(model, optimizer=plain_sgd(model))
    micro_step(engine, 0)
    later = model.net[0].weight.requires_grad_(False)
    for parameter in (frozen, later):
        deepspeed.utils.safe_set_full_fp32_param(parameter, torch.full(tuple(parameter.ds_shape), 0.5))
    micro_step(engine, 1)
    assert bool((full(frozen) == 0.5).all())
    assert bool((full(later) == 0.5).all())
    with pytest.raises(ValueError, match="frozen when it was built"):
        deepspeed.utils.safe_set_full_optimizer_state(frozen, torch.ones(tuple(frozen.ds_shape)), "exp_avg")


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_can_be_set(ranks, world_size):
    ranks(world_size).run(frozen_setters)


def anothers_part() -> list[bool]:
    """Rank 0 alone changes what belongs to rank 1; and an edit in an exception's handler."""
    import deepspeed

    from lightning_zero3.optimizer.edits import LostEditError

    engine = build()
    parameter = engine.module.net[0].weight
    raised = []
    try:
        with deepspeed.zero.GatheredParameters([parameter]):
            if torch.distributed.get_rank() == 0:
                parameter.data.view(-1)[-1] = 42.0
        raised.append(False)
    except LostEditError:
        raised.append(True)
    try:
        raise KeyError
    except KeyError:
        try:
            with deepspeed.zero.GatheredParameters([parameter]):
                parameter.data.fill_(0.5)
            raised.append(False)
        except LostEditError:
            raised.append(True)
    return raised


def test_an_edit_of_another_ranks_part_and_one_in_a_handler_are_noticed(ranks):
    first, second = ranks(2).run(anothers_part)
    assert first == [True, True]
    assert second == [False, True]


def moments_and_gradients() -> None:
    import deepspeed

    engine = build()
    micro_step(engine, 0)
    weights = tensors_of(engine.optimizer)["weights"]
    for parameter in engine.module.parameters():
        wanted = torch.rand(tuple(parameter.ds_shape), generator=torch.Generator().manual_seed(1))
        deepspeed.utils.safe_set_full_optimizer_state(parameter, wanted, "exp_avg")
        assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg"), wanted)
    assert all(torch.equal(a, b) for a, b in zip(weights, tensors_of(engine.optimizer)["weights"], strict=True))
    engine.backward(engine(batch_of(engine, 1), 1))
    for parameter in engine.module.parameters():
        # Sizes that two ranks don't divide, too: stock raises.
        wanted = torch.rand(tuple(parameter.ds_shape), generator=torch.Generator().manual_seed(2))
        deepspeed.utils.safe_set_full_grad(parameter, wanted)
        assert torch.equal(deepspeed.utils.safe_get_full_grad(parameter), wanted)
    with pytest.raises(ValueError, match="was to be set to 1 of them"):
        deepspeed.utils.safe_set_full_fp32_param(next(engine.module.parameters()), torch.ones(1))
    engine.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_moments_and_gradients_of_any_size_can_be_set(ranks, world_size):
    ranks(world_size).run(moments_and_gradients)


def hooks_end() -> None:
    import deepspeed

    engine = build()
    parameters = list(engine.module.parameters())
    assert all(hasattr(p.partition, "upstream") and hasattr(p.all_gather, "upstream") for p in parameters)
    other = build(stock=True)
    assert not any(hasattr(p.partition, "upstream") for p in other.module.parameters())
    # One context over two engines' parameters.
    mixed = [*parameters, *other.module.parameters()]
    with deepspeed.zero.GatheredParameters(mixed, modifier_rank=0):
        for parameter in mixed:
            parameter.data.fill_(0.5)
    assert all(bool((master_of(p) == 0.5).all()) for p in parameters)
    engine.optimizer.destroy()
    assert not any(hasattr(p.partition, "upstream") or hasattr(p.all_gather, "upstream") for p in parameters)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_belong_to_an_engines_parameters_and_end_with_it(ranks, world_size):
    ranks(world_size).run(hooks_end)


def frozen_and_stock() -> None:
    import deepspeed

    model = Trainable()
    frozen = model.net[0].weight.requires_grad_(False)
    engine = build(model)
    with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
        frozen.data.fill_(0.5)
    micro_step(engine, 0)
    assert bool((full(frozen) == 0.5).all())

    # With stock_semantics everything is upstream's, the lost edit included.
    engine = build(options=Zero3Options(stock_semantics=True, alias_master_weights=False))
    parameter = next(engine.module.parameters())
    assert not hasattr(parameter.partition, "upstream")
    before = master_of(parameter).clone()
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.fill_(0.5)
    assert torch.equal(master_of(parameter), before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_and_stock_semantics(ranks, world_size):
    ranks(world_size).run(frozen_and_stock)
