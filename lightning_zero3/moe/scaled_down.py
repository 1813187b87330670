# SPDX-License-Identifier: Apache-2.0
"""A small copy of a Hugging Face model: its own classes and every kind of layer that it has, with few, narrow ones.

What decides how experts and layers are shared out stays: the number of chosen experts, groups of experts, the ratio of
query to key heads, gates, scaling factors, ties. Widths, layers, experts and the vocabulary shrink to what the parallel
sizes leave room for. Whether the copy is one is seen by its modules: each layer is built of the classes of the layer
that it stands for, or :class:`UnscalableModelError`.

Upstream symbol: ``config._attn_implementation`` (Transformers 5.24), set to ``eager``: that is where a model's
constructor reads it, and only Transformers' loaders take it as an argument. Detected by tests. Expires when
constructors take it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe.router import BIAS
from lightning_zero3.topology import Topology

_WIDTH = 16
_VOCABULARY = 64
# Blocks and windows of attention, in tokens: shorter than a batch's sequences, so that they matter.
_WINDOW = 4
# A copy with more parameters than this has a width that isn't known here.
_MOST_PARAMETERS = 50_000_000
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
# Attributes of modules: PyTorch's, and what a copy has of its own.
_MAY_CHANGE = ("training", "initializer_range", "router_aux_loss_coef")
_TO_WIDTH = (
    "head_dim",
    "index_head_dim",
    "kv_lora_rank",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)

# Modules' classes, what MoE blocks do with their tokens, what the config says of the layer.
Kind = tuple[frozenset[tuple[str, str]], frozenset[tuple[str, bool | float]], tuple[Any, ...]]


class UnscalableModelError(SetupError):
    """A model of which no small copy can be made."""


def scaled_down(model: nn.Module, layout: Topology) -> Any:
    """The config of a small copy of a model.

    Args:
        model: A Hugging Face model, whole or partitioned; only its classes and its config are looked at.
        layout: The run's; widths, heads and experts of the copy are divisible by its sizes where the model's are.

    Returns:
        A config of the same class, for ``type(model)``.

    Raises:
        UnscalableModelError: No copy that is small and has all kinds of layers can be made.
    """
    whole: Any = model.config
    where = f"{type(model).__name__} (model_type={whole.model_type!r})"
    if whole.get_text_config() is not whole:
        raise UnscalableModelError(f"{where} is made of several models, each with a config of its own. {_REMEDY}")
    kinds = _kinds(model, whole)
    if not kinds:
        raise UnscalableModelError(
            f"{where} has no list of num_hidden_layers layers that could be shortened. {_REMEDY}"
        )
    chosen = sorted({index for kind in kinds for index in (kinds.index(kind), _last_index(kinds, kind))})
    config = copy.deepcopy(whole)
    try:
        _narrow(config, layout)
        _fewer_experts(config, layout)
        _fewer_layers(config, chosen)
        with torch.device("meta"):
            small = type(model)(config)
    except Exception as error:
        raise UnscalableModelError(f"{where} can't be built from a smaller config: {error!r}. {_REMEDY}") from error
    for index, found in zip(chosen, [*_kinds(small, config), *[None] * len(chosen)], strict=False):
        if found != kinds[index]:
            raise UnscalableModelError(
                f"Layer {index} of {where} can't be built from its config: "
                f"{_difference(kinds[index], found)}. {_REMEDY}"
            )
    if (parameters := sum(parameter.numel() for parameter in small.parameters())) > _MOST_PARAMETERS:
        widest = max(small.named_parameters(), key=lambda named: named[1].numel())
        raise UnscalableModelError(
            f"A copy of {where} would still have {parameters:,} parameters; {widest[0]} alone has shape "
            f"{tuple(widest[1].shape)}, by a field of the config that isn't known. {_REMEDY}"
        )
    return config


def randomize(model: nn.Module) -> None:
    """Leave nothing at a value where losing it would change nothing.

    Routers are spread out, so that tokens choose different experts and none nearly ties; correction biases, which
    Transformers starts at zero, change the choice; norms and other vectors aren't ones and zeros.

    Args:
        model: A whole Hugging Face model.
    """
    routers = {id(weight) for weight in _router_weights(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif id(parameter) in routers:
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.uniform_(-0.5, 0.5)


def build_random(model_class: type[nn.Module], config: Any, seed: int) -> Any:
    """A model whose values come from a seed alone; the caller's random state isn't kept.

    Args:
        model_class: A ``PreTrainedModel`` class.
        config: Its config.
        seed: The same seed gives the same values.
    """
    torch.manual_seed(seed)
    model = model_class(config)
    randomize(model)
    return model


_REMEDY = (
    "So verify_parallel can't compare it with Transformers: leave verify_parallel out, and compare a short run with "
    "one without parallel sizes yourself."
)


def _router_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights beside a module ``experts``, with one row for each expert."""
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        number = len(experts) if isinstance(experts, nn.ModuleList) else next(experts.parameters()).shape[0]
        for sibling in block.children():
            weight = getattr(sibling, "weight", None)
            if sibling is not experts and isinstance(weight, nn.Parameter) and weight.shape[:1] == (number,):
                yield weight


def _kinds(model: nn.Module, config: Any) -> list[Kind]:
    """Of each layer: its modules' classes by name, its MoE blocks' settings, what the config's lists say of it."""
    number = config.num_hidden_layers
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == number), ())
    said = [values for _, values in _lists_over_layers(config)]
    return [
        (
            frozenset(
                (re.sub(r"\d+", "N", path), f"{type(module).__module__}.{type(module).__qualname__}")
                for path, module in layer.named_modules()
            ),
            frozenset(_settings_of_experts(layer)),
            tuple(values[index] for values in said),
        )
        for index, layer in enumerate(layers)
    ]


def _settings_of_experts(layer: nn.Module) -> Iterator[tuple[str, bool | float]]:
    """What modules of a layer's MoE blocks keep of the config, as far as a small copy has the same.

    AutoEP reads the config. A module that was changed afterwards does something else, which a copy can't show.
    """
    for path, block in layer.named_modules():
        if not isinstance(getattr(block, "experts", None), nn.Module):
            continue
        for inner, module in block.named_modules():
            for name, value in vars(module).items():
                stays = isinstance(value, bool | float) or (name == "top_k" and isinstance(value, int))
                if stays and name not in _MAY_CHANGE and not name.startswith(("_", "ds_")) and "dropout" not in name:
                    yield re.sub(r"\d+", "N", ".".join(filter(None, (path, inner, name)))), value


def _last_index(kinds: list[Kind], kind: Kind) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _lists_over_layers(config: Any) -> list[tuple[str, list[Any]]]:
    fields = vars(config).items()
    number = config.num_hidden_layers
    # A list of layers' numbers may have any length.
    return [
        (name, values)
        for name, values in fields
        if isinstance(values, list) and len(values) == number and name not in ("mlp_only_layers", "architectures")
    ]


def _difference(wanted: Kind, found: Kind | None) -> str:
    if found is None:
        return "it is missing"
    changed = sorted(wanted[0] ^ found[0])
    if changed:
        path, kind = changed[0]
        return f"{path or 'the layer itself'} is {'no' if (path, kind) in found[0] else 'a'} {kind} in the model"
    settings = sorted(wanted[1] - found[1])
    if settings:
        name, value = settings[0]
        return f"{name} is {value!r} in the model, and {dict(found[1]).get(name, 'nothing')} by its config"
    return f"the config says {found[2]!r} of it instead of {wanted[2]!r}"


def _narrow(config: Any, layout: Topology) -> None:
    tensor = layout.tensor_parallel_size
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    fewer_keys = min(keys, max(2, tensor))
    fewer_queries = fewer_keys * min(queries // keys, 2)
    _set(config, "num_attention_heads", fewer_queries)
    _set(config, "num_key_value_heads", fewer_keys)
    # One indexer for each head of keys.
    _set(config, "index_n_heads", fewer_keys if getattr(config, "index_n_heads", 0) == keys else 2)
    if getattr(config, "rotary_dim", None):
        config.rotary_dim = max(2, config.rotary_dim * _WIDTH // config.head_dim // 2 * 2)
    for name in _TO_WIDTH:
        _set(config, name, _WIDTH)
    _set(config, "qk_head_dim", 2 * _WIDTH)
    config.hidden_size = _WIDTH * fewer_queries
    values_per_key = getattr(config, "linear_num_value_heads", 0) // (getattr(config, "linear_num_key_heads", 0) or 1)
    _set(config, "linear_num_key_heads", 2)
    _set(config, "linear_num_value_heads", 2 * min(values_per_key, 2))
    for index, name in enumerate(sorted(name for name in vars(config) if name.endswith("intermediate_size"))):
        _set(config, name, _WIDTH * tensor * (index + 1))
    for name in ("sliding_window", "attention_chunk_size", "index_block_size"):
        _set(config, name, _WINDOW)
    _set(config, "index_topk_blocks", 2)
    config.vocab_size = _VOCABULARY
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.use_cache = False
    config.dtype = torch.float32
    config._attn_implementation = "eager"
    # Ten times Transformers' own: what one layer does must be visible in the logits of so small a model.
    _set(config, "initializer_range", 0.2)
    # The auxiliary loss's part in each gradient, too.
    if getattr(config, "router_aux_loss_coef", None) is not None:
        config.router_aux_loss_coef = max(0.1, config.router_aux_loss_coef)
    for name in [name for name in vars(config) if "dropout" in name]:
        _set(config, name, 0.0)


def _fewer_experts(config: Any, layout: Topology) -> None:
    """As few as the expert parallel size, the choice and its groups allow; the choice itself stays."""
    names = [name for name in _EXPERTS if isinstance(getattr(config, name, None), int)]
    top_k = getattr(config, "num_experts_per_tok", None)
    if not names:
        return
    if not top_k:
        raise UnscalableModelError(f"its config has {names[0]}, but no num_experts_per_tok")
    experts = getattr(config, names[0])
    groups = getattr(config, "n_group", None) or 1
    open_groups = getattr(config, "topk_group", None) or groups
    step = math.lcm(layout.expert_parallel_size, groups)
    for fewer in range(step, experts + 1, step):
        # Every rank has more than one, as in a model of full size, and a group's two best make its score.
        if fewer >= max(2 * top_k, 2 * layout.expert_parallel_size, 2 * groups) and (
            fewer // groups * open_groups >= top_k
        ):
            for name in names:
                setattr(config, name, fewer)
            return


def _fewer_layers(config: Any, chosen: list[int]) -> None:
    for name, values in _lists_over_layers(config):
        setattr(config, name, [values[index] for index in chosen])
    if getattr(config, "first_k_dense_replace", None) is not None:
        config.first_k_dense_replace = sum(index < config.first_k_dense_replace for index in chosen)
    if hasattr(config, "mlp_only_layers"):
        step = getattr(config, "decoder_sparse_step", 1)
        dense = [index in (config.mlp_only_layers or ()) or (index + 1) % step != 0 for index in chosen]
        config.mlp_only_layers = [position for position, is_dense in enumerate(dense) if is_dense]
        _set(config, "decoder_sparse_step", 1)
    config.num_hidden_layers = len(chosen)


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field that the config has, where it isn't off (0 or None)."""
    if getattr(config, name, None):
        setattr(config, name, value)
