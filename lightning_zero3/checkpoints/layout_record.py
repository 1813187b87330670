# SPDX-License-Identifier: Apache-2.0
"""What each parameter of a sharded checkpoint is: written down when it is saved, so that another layout can read it.

DeepSpeed's files name a rank's tensors and their shapes there. Which experts, which slice and which range of its
elements that is, follows from the run that has saved it, and nothing in the files tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero3.checkpoints import frozen_experts
from lightning_zero3.config import SetupError
from lightning_zero3.moe.adapters import adapters_of, plain_record
from lightning_zero3.moe.boxes import Block, Ints
from lightning_zero3.moe.hugging_face import find_models
from lightning_zero3.moe.own_part import range_of
from lightning_zero3.moe.weight_names import Held, held_tensors, local_shape
from lightning_zero3.topology import Topology

# Among the entries of a model file that aren't DeepSpeed's.
SAVED = "lightning_zero3_layout"
# In it: path of a model → its adapters.
ADAPTERS = "adapters"


@dataclass(frozen=True)
class Range:
    """A range of a rank's tensor, and what that is of the model's.

    Args:
        held: Which boxes of which tensor of the whole model the rank's tensor is.
        shape: The rank's tensor's.
        start: The range's first element.
        stop: The first one after it.
        size: Elements that it takes in the rank's files, padding included.
    """

    held: Held
    shape: Ints
    start: int
    stop: int
    size: int


def ranges_of(module: nn.Module) -> dict[str, tuple[torch.Tensor, Range]]:
    """Every parameter and saved buffer of a root module, and what this rank keeps of it.

    Args:
        module: The root module, with its engine's layers in place.

    Returns:
        By the module's own names; tied ones each under theirs.

    Raises:
        SetupError: A layer doesn't say what it holds, or a partition can't be read as it is.
    """
    named: dict[str, tuple[torch.Tensor, Held]] = {}
    for path, model in find_models(module, lambda _: True)[0]:
        before = f"{path}." if path else ""
        for name, (tensor, held) in held_tensors(model).items():
            named[before + name] = tensor, Held(before + held.name, held.whole, held.blocks)
    saved = module.state_dict(keep_vars=True).keys()
    buffers = {name: each for name, each in module.named_buffers(remove_duplicate=False) if name in saved}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *buffers.items()):
        if name not in named:
            shape = local_shape(tensor)
            named[name] = tensor, Held(name, shape, (Block.of_all(shape),))
    return {name: (tensor, _range(tensor, held)) for name, (tensor, held) in named.items()}


def _range(tensor: Any, held: Held) -> Range:
    part = range_of(tensor)
    size = tensor.partition_numel() if hasattr(tensor, "ds_id") else part.stop
    return Range(held, part.shape, part.start, part.stop, size)


def record(module: nn.Module, layout: Topology) -> dict[str, Any]:
    """What a checkpoint says about its layout, in plain numbers and strings.

    Args:
        module: The root module.
        layout: The run's layout.
    """
    sizes: dict[str, Any] = {
        "ranks": layout.world_size,
        "expert_parallel_size": layout.expert_parallel_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
    }
    for path, model in find_models(module, lambda _: True)[0]:
        if (adapters := adapters_of(model)) is not None:
            sizes.setdefault(ADAPTERS, {})[path] = plain_record(adapters)
    try:
        ranges = ranges_of(module)
    except SetupError as error:
        # No reason not to save: it is told to who wants another layout.
        return {**sizes, "unknown": str(error)}
    return {**sizes, "ranges": {name: _plain(each) for name, (_, each) in ranges.items()}}


def _plain(each: Range) -> tuple[Any, ...]:
    blocks = tuple((block.here, block.there, block.size) for block in each.held.blocks)
    return each.held.name, each.held.whole, blocks, each.shape, each.start, each.stop, each.size


def recorded(entry: Mapping[str, Any]) -> dict[str, Range]:
    """The ranges of :func:`record`.

    Args:
        entry: What it has returned, as read from a file.

    Raises:
        ValueError: It is something else.
    """
    found = {}
    for key, (name, whole, blocks, shape, start, stop, size) in entry["ranges"].items():
        held = Held(name, tuple(whole), tuple(Block(*(tuple(each) for each in block)) for block in blocks))
        inside = all(
            first >= 0 and first + length <= limit
            for block in held.blocks
            for place, limits in ((block.here, shape), (block.there, held.whole))
            for first, length, limit in zip(place, block.size, limits, strict=True)
        )
        if not inside or not 0 <= start <= stop <= min(start + size, torch.Size(shape).numel()):
            raise ValueError(f"{key} has a range or a box beyond its tensor")
        found[key] = Range(held, tuple(shape), start, stop, size)
    return found


def keep_in_checkpoints(engine: Any, layout: Topology) -> None:
    """Have an engine's own ``save_checkpoint`` write the record, whoever calls it.

    Upstream symbol: ``DeepSpeedEngine.save_checkpoint``, replaced on one engine (0.19.7, 0.19.8). Reason: its files
    don't tell which part of a layer a rank holds. Detected by tests. Expires when they do.

    Args:
        engine: DeepSpeed's engine, with an optimizer.
        layout: The run's layout.
    """
    reference = weakref.ref(engine)

    def save_checkpoint(save_dir: Any, tag: Any = None, client_state: Any = None, *rest: Any, **named: Any) -> Any:
        alive = reference()
        assert alive is not None
        state = {**(client_state or {}), SAVED: record(alive.module, layout)}
        with frozen_experts.saved_as_other_weights(alive):
            return type(alive).save_checkpoint(alive, save_dir, tag, state, *rest, **named)

    engine.save_checkpoint = save_checkpoint
