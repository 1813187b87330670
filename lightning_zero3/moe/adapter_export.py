# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on their way out: in PEFT's own format, or merged into the weights by PEFT's own code.

What an adapter does, and what its file calls its tensors, is asked of PEFT, on a copy of the model without values
(:class:`Outline`); values come tensor by tensor from whoever holds them.

Upstream symbols: ``get_peft_model``, ``get_peft_model_state_dict``, ``BaseTunerLayer.merge``, ``get_base_layer``,
``ParamWrapper.parameter_name``; the prefix of ``adapter_model.safetensors`` (PEFT 0.21). Reason:
``PeftModel.save_pretrained`` and ``merge_and_unload`` want whole weights on one process. Detected by tests against both
in one process. Expires when PEFT merges and saves from parts.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.listing import first_few
from lightning_zero3.moe.adapters import (
    FROM_BASE,
    AdapterError,
    Adapters,
    base_name,
    copied_from,
    is_added,
    require_apart,
    tuner_layers,
)

MERGE, ONLY = "merge", "only"
FILE = "adapter_model"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_REMEDY = 'Export adapters="only" (PEFT\'s own format), or merge with PEFT in one process.'


def require_known(adapters: str) -> None:
    """Refuse another value of the option ``adapters``.

    Args:
        adapters: The user's.

    Raises:
        SetupError: It is none of the known ones.
    """
    if adapters not in (MERGE, ONLY):
        raise SetupError(f"adapters={adapters!r}: one of {MERGE}, {ONLY}; merge writes the model with them in it.")


class Outline:
    """A model with adapters, on the meta device: what is called how, and which layer merges what into which weight.

    Args:
        model: Transformers' model on the meta device, without adapters; PEFT's layers are put into it.
        adapters: What it shall have.

    Raises:
        AdapterError: They are of a kind that isn't exported.
    """

    def __init__(self, model: Any, adapters: Adapters) -> None:
        if len(adapters.active) != 1:
            raise AdapterError(
                f"The model computes with {len(adapters.active)} adapters ({', '.join(adapters.active) or 'none'}), "
                "and one is exported at a time. Choose it by model.set_adapter(name) before training."
            )
        (self.name,) = adapters.active
        self.config = copy.deepcopy(adapters.configs[self.name])
        _require_lora(self.name, self.config)
        from peft import get_peft_model

        outline = copy.deepcopy(self.config)
        outline.inference_mode, outline.init_lora_weights, outline.base_model_name_or_path = False, True, None
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # what PEFT has to say it has said when the model was built
            self._peft: Any = get_peft_model(model, outline, adapter_name=self.name)
        self.model: Any = self._peft.get_base_model()
        named = (copied_from(name, self.name) for name in self.model.state_dict())
        self._copies = {name for name in named if name is not None}
        self._merging: dict[str, list[tuple[str, Any]]] = {}
        for path, layer in tuner_layers(self.model):
            leaf = getattr(layer, "parameter_name", "weight")
            if self.name in layer.lora_A or self.name in layer.lora_embedding_A:
                self._merging.setdefault(_without_wrappers(path, leaf), []).append((path, layer))

    def saved_names(self) -> dict[str, str]:
        """Every tensor that ``adapter_model.safetensors`` has: its name there → what it is called in the model."""
        from peft import get_peft_model_state_dict

        markers = {name: name for name in self._peft.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = get_peft_model_state_dict(self._peft, state_dict=markers, adapter_name=self.name)
        return {name: base_name(marker.removeprefix(_PREFIX)) for name, marker in saved.items()}

    def added_to(self, name: str) -> tuple[str, ...]:
        """The adapter's tensors that are merged into a weight.

        Args:
            name: Transformers' name of the weight.
        """
        return tuple(
            f"{path}.{own}"
            for path, layer in self._merging.get(name, ())
            for own in _own_tensors(layer)
            if f".{self.name}." in f".{own}."
        )

    @torch.no_grad()
    def merged(self, name: str, whole: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight with the adapter in it, as PEFT's ``merge`` computes it in fp32.

        Args:
            name: Transformers' name of the weight.
            whole: The weight.
            values: The tensors of :meth:`added_to`.
        """
        for path, layer in self._merging.get(name, ()):
            filled = copy.deepcopy(layer)
            for own in _own_tensors(layer):
                if f"{path}.{own}" in values:
                    _put(filled, own, values[f"{path}.{own}"].float())
            leaf = getattr(layer, "parameter_name", "weight")
            base = filled.get_base_layer()
            _put(base, leaf, whole.float())
            filled.merge(safe_merge=False, adapter_names=[self.name])
            whole = getattr(base, leaf).detach()
        return whole

    def name_merged(self, name: str, own: str) -> str | None:
        """What a tensor is called where adapters are merged: a trained copy (``modules_to_save``) as its original.

        Args:
            name: Its name in the model, without wrappers.
            own: Its name with them, the engine's or Transformers'.

        Returns:
            The name; None for what a copy stands in for, and for other adapters' tensors.
        """
        if (original := copied_from(name, self.name)) is not None:
            return original
        if is_added(name):
            return name if f".{self.name}." in f".{name}." else None
        return None if name in self._copies and ".original_module." in f".{own}" else name

    def has_copy(self, name: str) -> bool:
        """Whether a tensor is the original of one that PEFT has trained a copy of.

        Args:
            name: Its name with wrappers, and with anything before the model's.
        """
        return ".original_module." in f".{name}" and any(base_name(name).endswith(each) for each in self._copies)

    def require_untied(self, names: Iterable[tuple[str, ...]]) -> None:
        """Refuse to merge into one of several names of a tensor: the others would change with it, or not follow.

        Args:
            names: Transformers' names of each tensor that has several.

        Raises:
            AdapterError: One of them has an adapter.
        """
        for tied in names:
            adapted = [name for name in tied if name in self._merging or name in self._copies]
            if adapted:
                raise AdapterError(
                    f"{' and '.join(tied)} are one tensor (tie_word_embeddings), and {adapted[0]} has an adapter, so "
                    f"merged weights would be two. {_REMEDY} Or train with tie_word_embeddings=False."
                )

    def write_config(self, folder: Path, base: Path | None) -> None:
        """Write adapter_config.json.

        Args:
            folder: Where to.
            base: The base checkpoint, which the file then names.
        """
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if base is not None:
            config.base_model_name_or_path = str(base)
        mapping = None
        if config.task_type is None:
            kind = type(self.model)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def outline_of(model: Any, adapters: Adapters) -> Outline:
    """The outline of a live model.

    Args:
        model: The Hugging Face model, of whatever layers.
        adapters: Its.

    Raises:
        AdapterError: An adapter is merged, or switched off.
    """
    for name, layer in tuner_layers(model):
        require_apart(name, layer)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        plain = type(model)(copy.deepcopy(model.config))
    return Outline(plain, adapters)


def require_mergeable(outline: Outline) -> None:
    """Refuse what PEFT's ``merge`` doesn't put into the one weight.

    Args:
        outline: Of the model.

    Raises:
        AdapterError: It is such an adapter.
    """
    if outline.config.lora_bias:
        raise AdapterError(f"The adapter {outline.name!r} has lora_bias=True, which isn't merged here. {_REMEDY}")


def require_restorable(outline: Outline, trained: Iterable[str]) -> None:
    """Refuse an adapter that is worth nothing without base weights that have been changed.

    Args:
        outline: Of the model.
        trained: Names of the model's tensors that are trained.

    Raises:
        AdapterError: Its method has changed base weights, or the run has.
    """
    written = set(outline.saved_names().values())
    besides = sorted(name for name in trained if not is_added(name) and name not in written)
    if besides:
        raise AdapterError(
            f"Weights are trained that aren't the adapter's: {first_few(besides)}. The adapter alone would be without "
            "them. Export adapters='merge', or train copies of them (modules_to_save)."
        )
    how = outline.config.init_lora_weights
    if isinstance(how, str) and how.lower().startswith(FROM_BASE):
        raise AdapterError(
            f"The adapter {outline.name!r} has init_lora_weights={how!r}, which has changed the base weights, so it "
            "can't be added to the original ones. Export adapters='merge'."
        )


def _require_lora(name: str, config: Any) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise AdapterError(f"The adapter {name!r} is of type {kind}, and LoRA (with its variant DoRA) is exported.")
    for field in (
        "trainable_token_indices",
        "layer_replication",
        "megatron_config",
        "alora_invocation_tokens",
        "arrow_config",
    ):
        if getattr(config, field, None):
            raise AdapterError(f"The adapter {name!r} has {field}, which isn't exported.")


def _without_wrappers(path: str, leaf: str) -> str:
    # One wrapper may be in another, for two parameters of one module.
    return base_name(f"{path}.{leaf}")


def _own_tensors(layer: nn.Module) -> list[str]:
    """An adapter layer's tensors, without those of what it wraps."""
    return [name for name, _ in layer.named_parameters() if not name.startswith("base_layer.") and is_added(name)]


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
