# SPDX-License-Identifier: Apache-2.0
"""One model from a few ranks to thousands: what a rank holds, does and sends at each size of the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_zero3.config import SetupError
from lightning_zero3.gpus import Gpu
from lightning_zero3.plan.child import Job, find_all
from lightning_zero3.plan.depth import scene_of
from lightning_zero3.plan.derive import derive
from lightning_zero3.plan.estimate import found_or_raise
from lightning_zero3.plan.memory import GIB, memory_of
from lightning_zero3.plan.models import load_model
from lightning_zero3.plan.predict import predict
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import shape_of


def scaled(setup: Setup, worlds: Sequence[int], gpu: Gpu) -> dict[str, Any]:
    """Set a run up and rehearse it once, and derive the other sizes of its world from it.

    What a step takes for a while is of whole layers and of a rank's own tokens, which don't depend on how many ranks
    there are: it is the rehearsed run's at every size.

    Args:
        setup: The run that is set up.
        worlds: Numbers of ranks, in nodes of ``setup.devices``.
        gpu: The GPU.

    Returns:
        ``title``, ``setup``, ``gpu``; ``points``: one object for each size that can be; ``impossible``: the others,
        with a reason.

    Raises:
        SetupError: The run can't be set up.
    """
    planned = load_model(setup)
    shape = shape_of(planned.config)
    (base,) = found_or_raise(find_all([Job(setup=setup, scenes=(scene_of(setup),))]))
    rehearsal = replace(base.rehearsals[0], held=None)
    points: list[dict[str, Any]] = []
    impossible: list[dict[str, Any]] = []
    for world in worlds:
        try:
            if world % setup.devices:
                raise SetupError(f"{world} ranks aren't whole nodes of {setup.devices}.")
            each = replace(setup, nodes=world // setup.devices)
        except SetupError as error:
            impossible.append({"ranks": world, "reason": str(error)})
            continue
        structure = derive(base.structure, setup, each)
        memory = memory_of(each, structure, rehearsal)
        prediction = predict(each, structure, shape)
        sent = {message.what: 0.0 for message in prediction.traffic}
        for message in prediction.traffic:
            sent[message.what] += message.sent_bytes / GIB
        points.append(
            {
                "ranks": world,
                "elements_per_rank": structure.elements_per_rank,
                "between_steps_gib": memory.between_steps / GIB,
                "total_gib": memory.total / GIB,
                "stock_between_steps_gib": memory.stock_between_steps / GIB,
                "fits": memory.fits(gpu),
                "sub_groups": len(structure.sub_groups),
                "collectives_ours": structure.collectives_ours.total,
                "collectives_stock": structure.collectives_stock.total,
                "sent_gib": prediction.sent_bytes / GIB,
                "sent_gib_by_kind": sent,
                "least_step_seconds": prediction.bounds[gpu.name].with_overlap,
            }
        )
    return {
        "title": planned.title,
        "gpu": gpu.name,
        "gpu_gib": gpu.memory_gib,
        "setup": setup.to_json(),
        "points": points,
        "impossible": impossible,
    }
