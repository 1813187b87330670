# SPDX-License-Identifier: Apache-2.0
"""A model with AutoEP's and AutoTP's layers beside plain Transformers: are they the same function?

Each rank holds its experts and its slices of layers, and compares them with the same part of what one process computes
by Transformers' own code from all ranks' batches. Nothing is sent but the errors.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from lightning_zero3.moe.weight_names import EXPERTS, LayerNames, of_layers
from lightning_zero3.topology import Topology

# Relative error of one tensor in fp32, where sums are added up in another order.
EXACT = 1e-5
# What rounding to bf16 leaves of a number, at most.
_ROUNDED = 2.0**-8
# Below this part of the largest gradient a gradient is what rounding has left of zero.
_NOTHING = 1e-6
# However far rounding is carried, a tensor is never allowed more than this times EXACT.
_MOST = 10.0
_TINY = 1e-30
# Gradients' names begin with this.
GRADIENT = "d "

Tensors = dict[str, torch.Tensor]


def loss_and_outputs(
    model: nn.Module, ids: torch.Tensor, call: Callable[..., Any] | None = None, **arguments: Any
) -> tuple[torch.Tensor, Tensors]:
    """What a model makes of a batch.

    Args:
        model: A Hugging Face model. One that has no head gets a loss of its hidden states and its routers' logits.
        ids: Token ids.
        call: What is called in its place: the engine around it.
        **arguments: For the model's forward.

    Returns:
        The loss, and whatever is to be compared, by name.
    """
    with_labels = {"labels": ids} if "labels" in inspect.signature(model.forward).parameters else {}
    out = (call or model)(input_ids=ids, **with_labels, **arguments)
    seen = {
        name: out[name] for name in ("loss", "aux_loss", "logits", "last_hidden_state") if out.get(name) is not None
    }
    if "loss" not in seen:
        routers = out.get("router_logits") or ()
        seen.update({f"router_logits.{index}": logits for index, logits in enumerate(routers)})
        seen["loss"] = sum((_weighed(values) for values in seen.values()), torch.zeros((), device=ids.device))
    return seen["loss"], {name: value.detach().float() for name, value in seen.items()}


def plain(model: nn.Module, batches: Sequence[torch.Tensor], lanes: int, lane: int, **arguments: Any) -> Tensors:
    """What one process computes: outputs of one data-parallel rank, gradients that are means over all of them.

    Args:
        model: A Hugging Face model; its gradients are added to.
        batches: The data-parallel ranks have these in turn.
        lanes: Number of data-parallel ranks.
        lane: The one whose outputs are wanted.
        **arguments: For the model's forward.
    """
    wanted: Tensors = {}
    for index, batch in enumerate(batches[:lanes]):
        share = len(range(index, lanes, len(batches))) / lanes
        loss, seen = loss_and_outputs(model, batch, **arguments)
        (loss * share).backward()
        if index == lane % len(batches):
            wanted = seen
    gradients = {f"{GRADIENT}{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**wanted, **gradients}


def allowances(model: nn.Module, theirs: Tensors, compute: Callable[[], Tensors]) -> dict[str, float]:
    """How many times :data:`EXACT` a tensor may differ: once, or more where the mathematics multiplies rounding.

    Some gradients are small differences of large terms (those of a linear attention's decay, say). How far rounding
    carries them is seen by changing the last digit of Transformers' own weights.

    Args:
        model: Plain Transformers' model, which ``compute`` calls; its weights are changed and its gradients dropped.
        theirs: What it has computed.
        compute: Computes it again.
    """
    model.zero_grad(set_to_none=True)  # the next backward adds to none of theirs
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
    changed = compute()
    return {
        name: min(max(1.0, float((changed[name] - value).norm()) / max(float(value.norm()) * EXACT, _TINY)), _MOST)
        for name, value in theirs.items()
    }


def gradients_of(model: nn.Module) -> Tensors:
    """This rank's experts' and slices' gradients, averaged over ranks, after an engine's backward; a collective.

    Args:
        model: The Hugging Face model inside a Stage-3 engine.
    """
    from deepspeed.utils import safe_get_full_grad

    gradients = {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}
    return {f"{GRADIENT}{name}": each.detach().float().clone() for name, each in gradients.items() if each is not None}


def relative_errors(
    ours: Tensors, theirs: Tensors, layout: Topology, rank: int, fused: Callable[[str], int] | None = None
) -> dict[str, float]:
    """Compare what a rank has with its part of what plain Transformers has.

    Args:
        ours: From :func:`loss_and_outputs` and :func:`gradients_of`.
        theirs: From :func:`plain`.
        layout: The run's.
        rank: This one.
        fused: Given a weight's name, of how many matrices it is made that are split one by one.

    Returns:
        Name of each tensor → the norm of the difference relative to the norm of Transformers', both of this rank's
        part. A gradient that is nothing but rounding counts relative to the largest one. Infinite where ours has no
        such tensor, has one of another shape, or has a gradient that Transformers hasn't.
    """
    ours = as_transformers_names(ours, theirs)
    largest = max((float(value.norm()) for name, value in theirs.items() if name.startswith(GRADIENT)), default=0.0)
    errors: dict[str, float] = {}
    for name, whole in theirs.items():
        mine = ours.get(name)
        part = None if mine is None else part_of(name, whole, mine.shape, layout, rank, fused or fused_by_name)
        if mine is None or part is None:
            errors[name] = math.inf
            continue
        scale = float(part.norm())
        if name.startswith(GRADIENT) and float(whole.norm()) <= _NOTHING * largest:
            scale = largest
        difference = float((mine - part.float()).norm())
        # An expert that gets no token has a gradient of zero, in both.
        errors[name] = 0.0 if difference == 0 else difference / scale if scale else math.inf
    # What of ours stands for nothing of theirs: one name, so that all ranks have the same.
    errors["weights that Transformers doesn't have"] = (
        math.inf if any(ours[name].any() for name in ours if name not in theirs) else 0.0
    )
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def as_transformers_names(seen: Mapping[str, torch.Tensor], theirs: Iterable[str]) -> Tensors:
    """Tensors of AutoEP's layers under Transformers' names and in its layout.

    Args:
        seen: By AutoEP's names.
        theirs: Transformers' names.
    """
    layer = LayerNames.like(theirs)
    named: Tensors = {}
    joined: dict[str, Tensors] = defaultdict(dict)
    for name, value in seen.items():
        renamed, expert = of_layers(name, layer)
        if expert is None:
            named[renamed] = value
        else:
            joined[renamed][expert] = value
    for name, matrices in joined.items():
        named[name] = torch.cat([matrices[expert] for expert in EXPERTS if expert in matrices], dim=1)
    return named


def fused_by_name(name: str) -> int:
    """Of how many matrices a weight is made, as Transformers names those of two."""
    return 2 if "gate_up_proj" in name else 1


def fused_by_specs(specs: Sequence[Mapping[str, Any]], path: str) -> Callable[[str], int]:
    """The same, as AutoTP's layer specifications say it.

    Args:
        specs: ``layer_specs`` of AutoTP's ``partition_config``.
        path: The model's dotted name inside the root module.
    """

    def fused(name: str) -> int:
        full_name = f"{path}.{name}" if path else name
        for spec in specs:
            if any(re.match(pattern, full_name) for pattern in spec.get("patterns", ())):
                first = (spec.get("shape") or [1])[0]
                return first if isinstance(first, int) and first > 0 else 1
        return fused_by_name(name)

    return fused


def part_of(
    name: str,
    whole: torch.Tensor,
    shape: torch.Size,
    layout: Topology,
    rank: int,
    fused: Callable[[str], int] = fused_by_name,
) -> torch.Tensor | None:
    """The part of a whole tensor that a rank holds.

    Args:
        name: Transformers' name of the tensor.
        whole: The tensor.
        shape: The part's.
        layout: The run's.
        rank: This one.
        fused: See :func:`relative_errors`.

    Returns:
        The part; None if none has this shape.
    """
    if whole.shape == shape:
        return whole
    cut = [dim for dim in range(whole.ndim) if whole.ndim == len(shape) and whole.shape[dim] != shape[dim]]
    if len(cut) != 1:
        return None
    (dim,) = cut
    if re.search(r"\.experts\.(gate_up|down)_proj$", name):
        parts, index, matrices = layout.expert_parallel_size, rank % layout.expert_parallel_size, 1
    else:
        parts, index = layout.tensor_parallel_size, rank % layout.tensor_parallel_size
        matrices = fused(name.removeprefix(GRADIENT))
    if whole.shape[dim] != parts * shape[dim] or shape[dim] % matrices:
        return None
    return torch.cat([matrix.chunk(parts, dim)[index] for matrix in whole.chunk(matrices, dim)], dim)


def _weighed(values: torch.Tensor) -> torch.Tensor:
    """A loss in which each value counts differently, and none twice as another."""
    weights = torch.cos(torch.arange(values.numel(), device=values.device, dtype=values.dtype))
    return (values.reshape(-1) * weights).mean()


def routing_error(router: nn.Module, tokens: torch.Tensor, chosen: Sequence[torch.Tensor]) -> float:
    """How far what AutoEP's router has chosen in bf16 is from what Transformers' own chooses.

    Args:
        router: Transformers', of the same layer, in the run's precision: it returns logits, weights and experts.
        tokens: What AutoEP's router got.
        chosen: What it returned: weights, then experts.

    Returns:
        The norm of the difference of all weights, relative to the norm of Transformers', and to what rounding leaves
        where Transformers rounds its weights to bf16: at most :data:`EXACT` if they are the same. A factor that they
        have in common is left out: layers apply it before or afterwards, and fp32 shows whether they do.
    """
    weights, experts = chosen[:2]
    with torch.no_grad():
        _, their_weights, their_experts = router(tokens)[:3]
    rounds = bool((their_weights.float() == their_weights.bfloat16().float()).all())
    number = int(max(experts.max(), their_experts.max())) + 1

    def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        none = torch.zeros(experts.shape[0], number, device=weights.device)
        return none.scatter(1, experts.long(), weights.detach().float())

    ours, theirs = dense(weights, experts), dense(their_weights, their_experts)
    factor = (ours * theirs).sum() / (theirs * theirs).sum()
    error = float((ours - factor * theirs).norm() / (factor * theirs).norm())
    return error * (EXACT / _ROUNDED) if rounds else error


def worst_over_ranks(errors: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Each error's largest value over all ranks, for all of them; a collective.

    Args:
        errors: This rank's; all ranks have the same names in the same order.
        device: Where collectives take place.
    """
    values = torch.tensor(list(errors.values()), dtype=torch.float64, device=device)
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))
