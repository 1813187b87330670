# SPDX-License-Identifier: Apache-2.0
"""Which of PEFT's adapters a Hugging Face model has, and what its weights are called with and without them.

Upstream symbols: ``PeftModel``, ``PeftMixedModel``, ``BaseTuner``, ``BaseTunerLayer``; a model's ``peft_config``; the
names ``base_layer``, ``original_module``, ``modules_to_save`` and ``lora_*`` (PEFT 0.21). Reason: PEFT wraps
modules in place, so a model's weights have other names than Transformers', and PEFT's wrappers answer for the model
inside them. Detected by tests over all families. Expires when PEFT tells what a parameter was called. PEFT isn't
imported here unless the user has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_zero3.config import SetupError

# A tensor that PEFT has added; of a LoRA's, the name of the adapter follows.
_ADDED = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save|token_adapter|trainable_tokens_\w+)(?=\.|$)")
_COPY = re.compile(r"\.modules_to_save\.([^.]+)(?=\.)")
_WRAPPED = re.compile(r"\.(base_layer|original_module)(?=\.)")
# Initial values that are computed from the base weights, which these methods may change too.
FROM_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")


class AdapterError(SetupError):
    """Adapters of a kind, or in a place, that can't be trained, loaded or exported like this."""


@dataclass(frozen=True)
class Adapters:
    """A model's adapters.

    Args:
        configs: The adapter's name → its ``PeftConfig``.
        active: Names of those that the model computes with.
    """

    configs: Mapping[str, Any]
    active: tuple[str, ...]


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's, around a Hugging Face model that it answers for.

    Args:
        module: Any module.
    """
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    from peft.tuners.tuners_utils import BaseTuner

    return isinstance(module, (peft.PeftModel, peft.PeftMixedModel, BaseTuner))


def is_tuner_layer(module: object) -> bool:
    """Whether a module is PEFT's, around a layer; without PEFT, none is.

    Args:
        module: Any module.
    """
    if sys.modules.get("peft") is None:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of a model that PEFT has wrapped, with their names.

    Args:
        model: Any module.
    """
    for name, module in model.named_modules():
        if is_tuner_layer(module):
            yield name, module


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters of a Hugging Face model, put in by ``get_peft_model`` or ``inject_adapter_in_model``.

    Args:
        model: The Hugging Face model itself, inside PEFT's wrapper.

    Returns:
        What it has; None without.
    """
    configs = getattr(model, "peft_config", None)
    if not configs or sys.modules.get("peft") is None:
        return None
    first = next(tuner_layers(model), None)
    active = tuple(configs) if first is None else tuple(first[1].active_adapters)
    return Adapters(dict(configs), active)


def is_added(name: str) -> bool:
    """Whether a tensor is an adapter's, by its name.

    Args:
        name: Its name in the model.

    >>> is_added("q_proj.lora_A.default.weight"), is_added("q_proj.base_layer.weight")
    (True, False)
    """
    return _ADDED.search(f".{name}") is not None


def base_name(name: str) -> str:
    """What a tensor was called before PEFT wrapped its module; an adapter's own tensors stay.

    Args:
        name: Its name in the model.

    >>> base_name("layers.0.q_proj.base_layer.weight"), base_name("lm_head.original_module.weight")
    ('layers.0.q_proj.weight', 'lm_head.weight')
    >>> base_name("experts.base_layer.lora_A.default.weight")
    'experts.base_layer.lora_A.default.weight'
    """
    return name if is_added(name) else _WRAPPED.sub("", name)


def copied_from(name: str, adapter: str | None = None) -> str | None:
    """Which tensor one in ``modules_to_save`` stands in for.

    Args:
        name: Its name in the model.
        adapter: The adapter that must be its; any by default.

    Returns:
        The other's name without PEFT; None for any other tensor.

    >>> copied_from("lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    found = _COPY.search(f".{name}")
    if found is None or (adapter is not None and found[1] != adapter):
        return None
    return base_name(_COPY.sub("", name))


def require_apart(name: str, layer: Any) -> None:
    """Refuse a layer whose adapter is in its weight already, or is switched off.

    Args:
        name: What a message calls it.
        layer: One of PEFT's.

    Raises:
        AdapterError: It is.
    """
    if layer.merged:
        raise AdapterError(f"The adapter of {name} is merged into its weight already: call unmerge_adapter() first.")
    if layer.disable_adapters:
        raise AdapterError(f"The adapter of {name} is switched off: call enable_adapter_layers() first.")


def refuse_loading_under(adapters: Adapters) -> None:
    """Refuse base weights for adapters whose first values were computed from others.

    Args:
        adapters: The model's.

    Raises:
        AdapterError: There is such an adapter.
    """
    for name, config in adapters.configs.items():
        how = getattr(config, "init_lora_weights", True)
        if getattr(config, "use_dora", False):
            said = "use_dora=True"
        elif isinstance(how, str) and how.lower().startswith(FROM_BASE):
            said = f"init_lora_weights={how!r}"
        elif getattr(config, "kasa_config", None):
            said = "kasa_config"
        else:
            continue
        raise AdapterError(
            f"The adapter {name!r} has {said}: its first values were computed from the weights that the model had when "
            "PEFT wrapped it, and other weights are to be loaded now. Load them before get_peft_model, in "
            "configure_model."
        )


def plain_record(adapters: Adapters) -> dict[str, Any]:
    """A model's adapters in plain strings, as a checkpoint keeps them.

    Args:
        adapters: The model's.
    """
    configs = {name: json.dumps(_plain(config.to_dict())) for name, config in adapters.configs.items()}
    return {"active": list(adapters.active), "configs": configs}


def from_record(entry: Mapping[str, Any]) -> Adapters:
    """The adapters of :func:`plain_record`.

    Args:
        entry: What it has returned, as read from a file.
    """
    configs = {name: config_of(json.loads(fields)) for name, fields in entry["configs"].items()}
    return Adapters(configs, tuple(entry["active"]))


def config_of(fields: Mapping[str, Any]) -> Any:
    """A ``PeftConfig`` of the fields of an adapter_config.json.

    Args:
        fields: The file's content.

    Raises:
        AdapterError: PEFT isn't installed.
    """
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise AdapterError("These weights have PEFT's adapters, and peft isn't installed: pip install peft.") from error
    return PeftConfig.from_peft_type(**fields)  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(each) for each in value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
