# SPDX-License-Identifier: Apache-2.0
"""``model.generate`` on partitioned weights: ranks go on together until the last of them is done.

Each forward gathers weights from all ranks. A rank whose sentences end early would leave the others waiting for ever.
Transformers has an argument for that, ``synced_gpus``, which it sets itself only where its own integration of DeepSpeed
has built the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import nn

from lightning_zero3.moe.hugging_face import find_models


@contextmanager
def ranks_in_step(root: nn.Module, world_size: int) -> Iterator[None]:
    """Let the Hugging Face models inside a module generate with ``synced_gpus=True`` where nothing else is said.

    Args:
        root: The root module.
        world_size: Number of ranks; one rank waits for nobody.
    """
    with ExitStack() as scope:
        model: Any
        models, _ = find_models(root, lambda module: hasattr(module, "generate"))
        for _, model in models if world_size > 1 else ():
            if "generate" not in vars(model):
                # A method, as Fabric's mark_forward_method asks for.
                model.generate = MethodType(_in_step(model.generate), model)
                scope.callback(delattr, model, "generate")
        yield


def _in_step(generate: Any) -> Any:
    def generate_in_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{"synced_gpus": True, **kwargs})

    return generate_in_step
