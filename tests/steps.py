# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps for tests: engines with every kind of optimizer, trained with stock's step or ours."""

from typing import Any

import torch

from lightning_zero3.config import Zero3Options
from lightning_zero3.moe.expert_parallel import find_target
from tests.engines import Trainable, build, micro_step, norm_of
from tests.fits import Sentences, assert_equal_bits, tensors_of
from tests.models import build_glm, tiny_glm

SWITCHES = ("coalesce_grad_norms", "batch_optimizer_step", "coalesce_persistent_gather", "skip_redundant_release")
STEPS = 4


def only(*names: str, **others: Any) -> Zero3Options:
    return Zero3Options(**{name: name in names for name in SWITCHES}, **others)


def optimizers(parameters: Any, kind: str) -> torch.optim.Optimizer:
    """Optimizers over one group, or over three with hyper-parameters of which two are equal."""
    from deepspeed.ops.adam import FusedAdam

    every = list(parameters)
    groups: Any = [
        {"params": every[0::3], "weight_decay": 0.1},
        {"params": every[1::3], "weight_decay": 0.0, "lr": 3e-2},
        {"params": every[2::3], "weight_decay": 0.1},
    ]
    makers = {
        "AdamW": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "AdamW foreach": lambda: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
        "AdamW fused": lambda: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        "AdamW amsgrad": lambda: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
        "Adam": lambda: torch.optim.Adam(groups, lr=1e-2, foreach=True),
        "SGD": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "SGD foreach, Nesterov": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
        "FusedAdam": lambda: FusedAdam(groups, lr=1e-2),
        "FusedAdam, lists": lambda: FusedAdam(groups, lr=1e-2, betas=[0.9, 0.99]),
        "Adagrad": lambda: torch.optim.Adagrad(every, lr=1e-2),
        "own class": lambda: Mine(groups, lr=1e-2),
    }
    return makers[kind]()


class Mine(torch.optim.AdamW):
    """A subclass may do anything, so it isn't merged."""


def state_of(engine: Any) -> dict[str, list[torch.Tensor]]:
    """What the step changes: weights, masters, moments, counts of steps, the flat gradients, what is gathered."""
    optimizer = engine.optimizer
    inner = optimizer.optimizer
    counts = [inner.state[master].get("step", 0) for master in optimizer.fp32_partitioned_groups_flat]
    return {
        **tensors_of(optimizer),
        "counts": [torch.as_tensor(count).clone() for count in counts],
        # A NaN equals itself here: where it came from is the same in both.
        "gradients": [optimizer.grad_partitions_flat_buffer.nan_to_num(nan=1e30)],
        "gathered": [p.data.clone() for p in engine.module.parameters()],
    }


def steps_of(engine: Any, steps: Any = range(STEPS), factors: Any = None) -> list[Any]:
    """Train; what was observed on the way. Each step has another learning rate, as a scheduler would give it."""
    seen: list[Any] = []
    accumulate = engine.gradient_accumulation_steps()
    for step in steps:
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = group["lr"] * (0.9 + 0.01 * step)
        for micro in range(accumulate):
            factor = 1.0 if factors is None else factors[step]
            seen.append(micro_step(engine, step * accumulate + micro, factor))
        seen.append(norm_of(engine))
        seen.append(engine.was_step_applied())
    return seen


def trained(
    stock: bool, options: Zero3Options, kind: str = "AdamW", factors: Any = None, **config: Any
) -> tuple[Any, list[Any]]:
    """An engine after its steps, and what was observed."""
    model = Trainable()
    engine = build(model, stock=stock, options=options, optimizer=optimizers(model.parameters(), kind), **config)
    return engine, steps_of(engine, factors=factors)


def equal(ours: tuple[Any, list[Any]], stock: tuple[Any, list[Any]]) -> None:
    assert repr(ours[1]) == repr(stock[1])  # where a loss is NaN, it equals itself in print only
    assert_equal_bits(state_of(ours[0]), state_of(stock[0]))


def pair(options: Zero3Options, kind: str = "AdamW", factors: Any = None, **config: Any) -> tuple[Any, Any]:
    """Stock and ours through the same steps; every tensor compared. Returns both engines."""
    stock, ours = (trained(is_stock, options, kind, factors, **config) for is_stock in (True, False))
    equal(ours, stock)
    return stock[0], ours[0]


def merged(engine: Any) -> int:
    """Calls to the optimizer in the last step, or 0 where upstream made them."""
    return engine.optimizer.optimizer_calls


def expert_trained(stock: bool, size: int, steps: int, **config: Any) -> tuple[Any, list[float], list[Any]]:
    """An engine over a tiny GLM with AutoEP's layers, after its steps; losses and norms on the way."""
    of_model = tiny_glm(n_routed_experts=4)
    model = build_glm(of_model, seed=3)
    engine = build(
        model,
        stock=stock,
        target=find_target(model),
        sub_group_size=1500,
        gradient_clipping=0.5,
        expert_parallel={"enabled": True, "autoep_size": size, "preset_model": "deepseek_v3"},
        **config,
    )
    data, rank = Sentences(of_model.vocab_size), torch.distributed.get_rank()
    losses, norms = [], []
    for step in range(steps):
        ids = data.ids[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm_of(engine))
    return engine, losses, norms
