# SPDX-License-Identifier: Apache-2.0
"""Router logits for the auxiliary loss: recorded from AutoEP's layers as Transformers records them from its own.

Transformers records a router's logits by hooks, which AutoEP moves to the layers that it puts in. Two things go wrong:
the registry of what is recorded has another key than AutoEP thinks, and AutoEP's Qwen layers hand out probabilities
where Transformers computes its auxiliary loss from logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_zero3.capabilities.limits import needs_output_recorders, output_recorders_break
from lightning_zero3.moe.router_trial import WIDTH, try_router


@contextmanager
def movable_recorders(preset: str) -> Iterator[None]:
    """Let AutoEP find and move Transformers' output recorders, for the length of ``deepspeed.initialize``.

    Upstream symbol: ``transformers.utils.output_capturing._CAN_RECORD_REGISTRY`` (5.23, 5.24), used by
    ``deepspeed/module_inject/auto_ep_presets/base.py`` (0.19.7, 0.19.8). Reason: Transformers keys it by the model,
    DeepSpeed by the name of the model's class, with a default. Inside the block it takes either; DeepSpeed itself puts
    back the entries that it writes. Detected by moving a recorder of a model of three modules. Expires when DeepSpeed
    passes the model; the block then does nothing.

    Args:
        preset: The AutoEP preset in use. One that moves no recorders needs nothing.
    """
    if not needs_output_recorders(preset) or not output_recorders_break():
        yield
        return
    with _registry_of_either_key():
        yield


def recorders_can_be_moved(preset: str) -> bool:
    """Whether AutoEP can move the recorders of a preset's models, by itself or inside :func:`movable_recorders`.

    Args:
        preset: Name of a preset of the installed DeepSpeed.
    """
    with movable_recorders(preset):
        return not needs_output_recorders(preset) or not output_recorders_break()


@contextmanager
def _registry_of_either_key() -> Iterator[None]:
    from transformers.utils import output_capturing

    registry: Any = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    if not isinstance(registry, dict):
        yield
        return
    upstream = type(registry)

    class EitherKey(upstream):  # type: ignore[misc, valid-type]
        """Transformers' registry, that can also be asked by a class's name."""

        def get(self, key: Any, *default: Any) -> Any:
            """What is recorded of a model's class; without a default, as Transformers asks, ``{}`` for nothing."""
            return super().get(key) if not isinstance(key, str) else dict.get(self, key, *default)

        def __setitem__(self, key: Any, recorded: Any) -> None:
            if isinstance(key, str):
                dict.__setitem__(self, key, recorded)
            else:
                super().__setitem__(key, recorded)

    # Not another object under its name: a module that is first imported meanwhile would hold on to that.
    registry.__class__ = EitherKey
    try:
        yield
    finally:
        registry.__class__ = upstream


def as_transformers_records(layers: Sequence[Any], model: nn.Module) -> list[Any]:
    """AutoEP's plan for its layers, with logits recorded raw where Transformers' own router gives them raw.

    Upstream symbol: ``MoELayerSpec.router_logits_capture_mode`` (0.19.7, 0.19.8), ``"post_score"`` for Qwen3.5.
    Reason: Transformers' auxiliary loss applies the softmax itself, so it would be applied twice. Detected by running
    a router of the model's own class. Expires when the preset says ``"raw"``.

    Args:
        layers: ``MoELayerSpec`` of each layer, from AutoEP's parser.
        model: The Hugging Face model before any layer is replaced.
    """
    planned = list(layers)
    for index, layer in enumerate(planned):
        if layer.return_router_logits and layer.router_logits_capture_mode == "post_score":
            router = model.get_submodule(f"{layer.moe_module_name}.{layer.router_name}")
            if _gives_raw_logits(type(router), model.config):
                planned[index] = replace(layer, router_logits_capture_mode="raw")
    return planned


def _gives_raw_logits(router_class: type[nn.Module], config: Any) -> bool:
    """Whether the first output of a router, which is what is recorded, is a plain product with its weight."""

    def is_the_product(router: Any) -> bool:
        router.weight.normal_()
        tokens = torch.randn(3, WIDTH, dtype=router.weight.dtype)
        return bool(torch.allclose(router(tokens)[0], tokens @ router.weight.T, atol=1e-4))

    otherwise = (
        "its logits are recorded as DeepSpeed's AutoEP records them. If you train with the auxiliary loss, compare it "
        "with a run without expert_parallel_size."
    )
    return try_router(router_class, config, is_the_product, otherwise)
