# SPDX-License-Identifier: Apache-2.0
"""LoRA on layers that AutoTP splits: the adapter is split as its layer is.

Of a layer that is split by output, the second matrix is, by the same rows; of one that is split by input, the first
matrix is, by the same columns, and its product is summed over peers. The other matrix stays whole on every peer.

Upstream symbols: ``BaseTunerLayer.weight`` and ``lora.Linear``'s ``base_layer``, ``lora_A``, ``lora_B`` (PEFT
0.21); ``AutoTP._replace_module``, ``AutoTP.register_replicated_grad_hooks`` (0.19.7, 0.19.8). Reason: PEFT's wrapper
shows its layer's weight as its own, so AutoTP splits the wrapper as if it were a plain layer, and the adapter is lost.
Detected by tests against PEFT in one process. Expires when AutoTP knows PEFT's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero3.moe.adapters import AdapterError, base_name, copied_from, tuner_layers
from lightning_zero3.substitution import substituted

_END = r"\.weight$"


def partition_of(partition: Mapping[str, Any], path: str, module: nn.Module) -> dict[str, Any]:
    """AutoTP's ``partition_config`` for a model whose layers PEFT may have wrapped, and some of which may be frozen.

    Args:
        partition: For the model without adapters.
        path: The model's dotted name inside the root module.
        module: The model.
    """
    specs = []
    for spec in partition["layer_specs"]:
        if spec.get("grad_allreduce"):
            # AutoTP hooks these gradients, and fails where there is none.
            trained = [
                name
                for name in _full_names(path, module, trained=True)
                if any(re.match(pattern, name) for pattern in spec["patterns"])
            ]
            if trained:
                specs.append({**spec, "patterns": [f"{re.escape(name)}$" for name in trained]})
            continue
        specs.append(spec)
        matrix = {"column": "lora_B", "row": "lora_A"}[spec["partition_type"]]
        wrapped = [p.removesuffix(_END) for p in spec["patterns"] if p.endswith(_END)]
        inside = rf"\.(?:base_layer|{matrix}\.[^.]+){_END}"
        specs.append({**spec, "patterns": [pattern + inside for pattern in wrapped]})
    return {**partition, "layer_specs": specs}


def check(path: str, module: nn.Module, partition: Mapping[str, Any] | None) -> None:
    """Refuse adapters on split layers that can't be split with them.

    Args:
        path: The model's dotted name inside the root module.
        module: The model.
        partition: Of :func:`partition_of`, or None where the user's own config says what is split.

    Raises:
        AdapterError: There is one, with its place and what to do.
    """
    wrapped = dict(tuner_layers(module))
    if not wrapped and not any(copied_from(name) for name, _ in module.named_parameters()):
        return
    if partition is None:
        raise AdapterError(
            "tensor_parallel.partition_config in the DeepSpeed config says which layers are split, and PEFT's adapters "
            "in the model would have to be split with them. Say it by "
            "lightning_zero3.moe.tensor_parallel.register_tensor_parallel, which adapters follow."
        )
    from peft.tuners.lora import Linear

    for name in (name for name, _ in module.named_parameters()):
        copied = copied_from(name)
        if copied is not None and _is_split(_joined(path, copied), partition):
            raise AdapterError(
                f"modules_to_save has {copied}, which tensor_parallel_size splits, and PEFT's copy of it can't be. "
                "Train an adapter of it (target_modules), or leave tensor_parallel_size out."
            )
    for name, layer in wrapped.items():
        if any(not isinstance(each, nn.Identity) for each in getattr(layer, "lora_dropout", {}).values()):
            raise AdapterError(
                f"{_joined(path, name)} has lora_dropout, and with tensor_parallel_size peers would draw it each for "
                "itself. Take LoraConfig(lora_dropout=0.0), or leave tensor_parallel_size out."
            )
        if not _is_split(_joined(path, f"{base_name(f'{name}.weight')}"), partition):
            continue
        problem = None
        if type(layer) is not Linear:
            problem = f"is PEFT's {type(layer).__module__}.{type(layer).__name__}"
        elif any(layer.use_dora.values()) or getattr(layer, "lora_variant", None):
            problem = "is a variant of LoRA (use_dora, aLoRA, ...)"
        elif any(layer.lora_bias.values()):
            problem = "has lora_bias=True"
        if problem is not None:
            raise AdapterError(
                f"{_joined(path, name)} is split by tensor_parallel_size, and its adapter {problem}. Plain LoRA "
                "without dropout is split with its layer: LoraConfig(lora_dropout=0.0). Take that, leave the layer "
                "out of target_modules, or leave tensor_parallel_size out."
            )


@contextmanager
def walked_into(module: nn.Module) -> Iterator[None]:
    """Let AutoTP walk into PEFT's layers, for the length of ``deepspeed.initialize``.

    Args:
        module: The model that it splits.
    """
    if next(tuner_layers(module), None) is None:
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    def no_weight(_: Any) -> Any:
        raise AttributeError("weight")

    with substituted(BaseTunerLayer, "weight", property(no_weight)):
        yield


def _is_split(name: str, partition: Mapping[str, Any]) -> bool:
    return any(
        spec["partition_type"] != "skip" and re.match(pattern, name)
        for spec in partition["layer_specs"]
        for pattern in spec["patterns"]
    )


def _full_names(path: str, module: nn.Module, *, trained: bool) -> Iterator[str]:
    return (_joined(path, name) for name, p in module.named_parameters() if p.requires_grad == trained)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
