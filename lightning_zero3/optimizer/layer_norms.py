# SPDX-License-Identifier: Apache-2.0
"""``grad_norms``: what Lightning's ``grad_norm`` gives, from gradients that are partitioned over ranks.

Under ZeRO Stage 3 ``p.grad`` is None in every hook, since each rank keeps its partition of each gradient in a buffer of
the optimizer's. Here each rank adds up its own elements, all parameters' sums travel in one vector, and one all-reduce
over all ranks makes the norms.

Upstream symbols: ``_z3_optimizer`` (on each parameter), the name-mangled ``__param_id_to_grad_partition``,
``partition_numel``, ``loss_scale``, ``torch_autocast_gradscaler`` (0.19.7, 0.19.8). Reason: upstream's
``safe_get_full_grad`` gathers one parameter after the other, whole, and gives the last step's partition for a
parameter without a gradient. Detected by their absence, which raises. Expires when upstream has norms per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from lightning_utilities.core.rank_zero import WarningCache

_warnings = WarningCache()


@torch.no_grad()
def grad_norms(module: torch.nn.Module, norm_type: float | int | str = 2) -> dict[str, torch.Tensor]:
    """Each parameter's gradient norm and that of all gradients together, as ``lightning.pytorch.utilities.grad_norm``.

    The norms are those **before clipping**, with the loss scale of fp16 taken out, averaged over ranks, and added up
    over the micro-batches so far. Call it in ``on_after_backward`` (after every micro-batch) or in
    ``on_before_optimizer_step`` (before every step), **on every rank**: it needs one all-reduce. Within the step the
    gradients are handed over to the optimizer; afterwards, in ``on_before_zero_grad`` for example, there are none.

    With a strategy that doesn't partition gradients it is Lightning's own function.

    Args:
        module: A LightningModule or any part of it.
        norm_type: The order of the norm: a positive number or ``"inf"``.

    Returns:
        ``grad_{norm_type}_norm/{name}`` for every parameter that has a gradient, and ``grad_{norm_type}_norm_total``;
        empty where there is no gradient. Scalars on the parameters' device, the same on all ranks.

    Raises:
        ValueError: A ``norm_type`` that isn't positive.
        NotImplementedError: Gradients that lie on NVMe, aren't summed over ranks, or belong to another optimizer.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: a positive number or 'inf' is expected.")
    partitioned = [(name, p) for name, p in module.named_parameters() if hasattr(p, "_z3_optimizer")]
    if not partitioned:
        return grad_norm(module, norm_type)  # type: ignore[return-value]
    optimizer: Any = partitioned[0][1]._z3_optimizer
    _refuse_other_layouts(optimizer)
    if not optimizer._reduced:
        _warnings.warn(
            "grad_norms found no gradients. ZeRO Stage 3 hands them to the optimizer within its step: call it in "
            "on_after_backward or on_before_optimizer_step."
        )
        return {}
    trained = [(name, p) for name, p in partitioned if optimizer.is_optimized(p)]
    partitions = optimizer._gradient_partitions()
    # Experts may get a gradient on one rank only, so every rank speaks of every parameter.
    mine = [
        partitions[p.ds_id][: optimizer.real_elements(p)] if p.ds_id in optimizer._reduced else None  # type: ignore[attr-defined]
        for _, p in trained
    ]
    norms, present = _over_ranks(mine, norm_type, trained[0][1].device)
    norms /= _loss_scale(optimizer)
    named = {
        f"grad_{norm_type}_norm/{name}": norm
        for (name, _), norm, is_there in zip(trained, norms.float(), present.tolist(), strict=True)
        if is_there
    }
    if named:
        named[f"grad_{norm_type}_norm_total"] = torch.linalg.vector_norm(norms, norm_type).float()
    return named


def _over_ranks(
    mine: Sequence[torch.Tensor | None], norm_type: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms over all ranks of tensors of which each rank has a part, by one all-reduce.

    Args:
        mine: This rank's parts; an empty one where it has none of a gradient, None where it knows of no gradient.
        norm_type: The order.
        device: Where the vector of norms is.

    Returns:
        The norms, fp64, and where any rank has a gradient.
    """
    packed = torch.zeros(2, len(mine), dtype=torch.float64, device=device)
    norms, present = packed.unbind()
    filled = {k: part for k, part in enumerate(mine) if part is not None and part.numel()}
    if filled:
        found = torch._foreach_norm(list(filled.values()), norm_type, dtype=torch.float64)
        norms[list(filled)] = torch.stack(list(found)).to(device)
    present[[k for k, part in enumerate(mine) if part is not None]] = 1
    if math.isinf(norm_type):
        torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX)
        return norms, present > 0
    norms.pow_(norm_type)
    torch.distributed.all_reduce(packed)
    return norms.pow_(1 / norm_type), present > 0


def _loss_scale(optimizer: Any) -> float:
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    return float(scaler.get_scale() if scaler else optimizer.loss_scale)


def _refuse_other_layouts(optimizer: Any) -> None:
    """Raise where the sum over all ranks of what the partitions hold isn't the gradient."""
    if not hasattr(optimizer, "_reduced"):
        raise NotImplementedError(
            f"grad_norms doesn't know where {type(optimizer).__name__} keeps its gradients. Take "
            "deepspeed.utils.safe_get_full_grad for single parameters."
        )
    if getattr(optimizer, "swap_optimizer", False):
        raise NotImplementedError(
            "grad_norms can't read gradients that DeepSpeed keeps on NVMe. After the step, "
            "trainer.strategy.model.get_global_grad_norm() has the norm of all gradients."
        )
    world = torch.distributed.get_world_size()
    for group in optimizer.fp16_groups:
        experts = optimizer._autoep_expert_parallel_group(group)
        shards = 1 if experts is None else torch.distributed.get_world_size(experts)
        if optimizer._get_param_partition_world_size(group[0]) * shards != world:
            raise NotImplementedError(
                "grad_norms adds up every rank's part once, but here several ranks hold the same part (tensor or "
                "sequence parallelism, or MiCS). After the step, trainer.strategy.model.get_global_grad_norm() has the "
                "norm of all gradients."
            )
