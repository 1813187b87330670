# SPDX-License-Identifier: Apache-2.0
"""Which model a plan is of: a recipe's full size, or a Hugging Face config in a folder. Nothing is downloaded."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_zero3.config import SetupError
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.recipe_files import load_recipe

# Far beyond any model; a module is built for every layer.
_MOST = {"hidden_size": 10**6, "num_hidden_layers": 10**4, "num_attention_heads": 10**5, "vocab_size": 10**8}


@dataclass(frozen=True)
class PlannedModel:
    """What is to be built.

    Args:
        title: For people.
        model_class: A ``PreTrainedModel`` class for causal language modelling.
        config: Its config.
    """

    title: str
    model_class: type[Any]
    config: Any


def load_model(setup: Setup) -> PlannedModel:
    """Find a setup's model.

    Args:
        setup: Names a recipe or a folder.

    Raises:
        SetupError: There is no such recipe or folder, or its config can't be used; the message says why.
    """
    if setup.recipe is not None:
        return _of_recipe(setup.recipe, setup.layers)
    assert setup.model is not None
    return _of_folder(Path(setup.model), setup.layers)


def recipe_settings(name: str) -> Any:
    """How a recipe trains its full size.

    Args:
        name: The recipe's.

    Raises:
        SetupError: There is no such recipe; the message lists those that there are.
    """
    return load_recipe(name).SETTINGS["full"]


def _of_recipe(name: str, layers: int | None) -> PlannedModel:
    recipe = load_recipe(name).RECIPE
    settings = replace(recipe_settings(name), layers=layers)
    whole = recipe.configs["full"](None).num_hidden_layers
    return PlannedModel(f"{recipe.name}, {_said(layers, whole)}", recipe.model_class, recipe.config(settings))


def _of_folder(folder: Path, layers: int | None) -> PlannedModel:
    where = folder / "config.json"
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise SetupError(f"--model {folder}: {where} can't be read: {why}. A folder with a config.json.") from error
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise SetupError(f"--model {folder}: {where} isn't JSON: {error}.") from error
    config = config_of(fields, where)
    model_class = class_for(config, str(where))
    title = f"{folder.resolve().name}, {_said(layers, config.num_hidden_layers)}"
    return PlannedModel(title, model_class, _cut(config, layers))


def _cut(config: Any, layers: int | None) -> Any:
    """A config of the first layers of the same model."""
    whole = config.num_hidden_layers
    if layers is None or layers == whole:
        return config
    if layers > whole:
        raise SetupError(f"--layers {layers}: the model has {whole}.")
    # What is said of each layer, such as `layer_types`, and their number.
    of_layers = {n: v[:layers] for n, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == whole}
    cut = copy.deepcopy(config)
    for name, value in (*of_layers.items(), ("num_hidden_layers", layers)):
        setattr(cut, name, value)
    return cut


def config_of(fields: Any, where: Path) -> Any:
    """The config of the text model that a config.json describes.

    Args:
        fields: Its content.
        where: What messages call it.

    Raises:
        SetupError: It isn't one, or Transformers refuses it.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise SetupError(f"{where} has no model_type: it isn't a Hugging Face model's config.")
    if kind not in CONFIG_MAPPING:
        raise SetupError(f"{where}: the installed Transformers has no model_type {kind!r}.")
    try:
        config = AutoConfig.for_model(**fields).get_text_config()
    except Exception as error:  # Transformers' configs check themselves, by exceptions of many classes.
        raise SetupError(f"{where} is refused by Transformers: {one_line(error)}") from error
    # A composite config's text model is what is planned.
    inside = [
        part for part in fields.values() if isinstance(part, dict) and part.get("model_type") == config.model_type
    ]
    _require_fields(config, {**fields, **(inside[0] if inside else {})}, where)
    return config


def _require_fields(config: Any, fields: dict[str, Any], where: Path) -> None:
    """Refuse a config whose sizes would be Transformers' defaults, or can't be."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not hasattr(config, name):
            raise SetupError(f"{where}: a {config.model_type!r} has no {name}; only models with attention are planned.")
        if name not in fields and config.attribute_map.get(name) not in fields:
            raise SetupError(f"{where} doesn't say {name}.")
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST[name]:
            raise SetupError(f"{where}: {name} is {value!r}; a whole number from 1 to {_MOST[name]:,} is expected.")
    try:
        shape = shape_of(config)
    except (TypeError, ValueError) as error:  # a list, say, where most models have one number
        raise SetupError(f"{where}: its sizes can't be read: {one_line(error)}.") from error
    # Not every model names the number that a token sees as most do; it is 0 here then.
    if not 0 <= shape.experts_per_token <= shape.experts and shape.experts:
        raise SetupError(f"{where}: {shape.experts_per_token} of {shape.experts} experts can't see a token.")


def class_for(config: Any, where: str) -> type[Any]:
    """Transformers' class for causal language modelling with such a config.

    Args:
        config: A config.
        where: What messages call it.

    Raises:
        SetupError: There is none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SetupError(f"{where}: Transformers has no causal language model of model_type {config.model_type!r}.")
    found: type[Any] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def _said(layers: int | None, whole: int) -> str:
    return f"{whole} layers" if layers in (None, whole) else f"the first {layers} of {whole} layers"


def one_line(error: BaseException) -> str:
    """An exception's text on one line, with its class where that is all there is."""
    text = " ".join(str(error).split())
    return text or type(error).__name__
