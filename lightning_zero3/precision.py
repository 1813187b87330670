# SPDX-License-Identifier: Apache-2.0
"""What each precision gives, which combinations are refused, and what is kept in fp32 or named when it is rounded.

``PRECISIONS`` is the table of docs/precision.md; a test measures each cell on a real fit.

Upstream symbols: Lightning's ``DeepSpeedPrecision.convert_module`` (2.6.6), which rounds buffers under the "true"
precisions; DeepSpeed's ``_cast_module_mixed_precision`` (0.19.7, 0.19.8), which casts every weight of an engine to one
dtype and leaves buffers alone; ``zero.Init``, which rounds tensors while a model is built. Detected by tests. Expires
when Lightning leaves buffers alone and Stage 3 can hold weights of several dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3.config import ConfigConflictError
from lightning_zero3.substitution import substituted

_SIXTEEN = (torch.bfloat16, torch.float16)
_WANTED = {"16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}


@dataclass(frozen=True)
class Precision:
    """One row of the table; dtypes as ``fp32``, ``bf16``, ``fp16``.

    Args:
        what: How it is asked for.
        precision: The Trainer's precision.
        config: What the DeepSpeed config adds.
        weights: What forward reads and ranks gather.
        computes: What a linear layer computes in.
        masters: What the optimizer updates.
        states: The optimizer's moments.
        gradients: What micro-batches are added up in.
        reductions: What gradients are sent in.
        buffers: Buffers that are fp32 in a module of the user's own.
        buffers_of_transformers: The same inside a Transformers model.
        measured: Whether a test measures the row; fp16 engines need a GPU.
    """

    what: str
    precision: str
    weights: str
    computes: str
    masters: str
    states: str
    gradients: str
    reductions: str
    buffers: str = "fp32"
    buffers_of_transformers: str = "fp32"
    config: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True


_BF16: dict[str, Any] = {"weights": "bf16", "computes": "bf16", "masters": "fp32", "states": "fp32"}
_BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_FP32: dict[str, Any] = {"weights": "fp32", "masters": "fp32", "states": "fp32", "gradients": "fp32"}

PRECISIONS: tuple[Precision, ...] = (
    Precision('"32-true"', "32-true", **_FP32, computes="fp32", reductions="fp32"),
    Precision('"bf16-mixed"', "bf16-mixed", **_BF16, gradients="bf16", reductions="bf16"),
    Precision('"bf16-true"', "bf16-true", **_BF16, gradients="bf16", reductions="bf16", buffers="bf16"),
    Precision(
        '"bf16-mixed", `data_types: {grad_accum_dtype: fp32}`',
        "bf16-mixed",
        **_BF16,
        gradients="fp32",
        reductions="bf16",
        config={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Precision(
        '"bf16-mixed", `communication_data_type: fp32`',
        "bf16-mixed",
        **_BF16,
        gradients="bf16",
        reductions="fp32",
        config={"communication_data_type": "fp32"},
    ),
    Precision(
        '"bf16-mixed", bf16 masters and states',
        "bf16-mixed",
        **{**_BF16, "masters": "bf16", "states": "bf16"},
        gradients="bf16",
        reductions="bf16",
        config={"bf16": _BF16_MASTERS},
    ),
    Precision(
        '"bf16-true", `data_types: {buffer_dtype: fp32}`',
        "bf16-true",
        **_BF16,
        gradients="bf16",
        reductions="bf16",
        config={"data_types": {"buffer_dtype": "fp32"}},
    ),
    Precision(
        '"32-true", `torch_autocast` to bfloat16',
        "32-true",
        **_FP32,
        computes="bf16",
        reductions="bf16, fp32",
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
    Precision(
        '"16-mixed"',
        "16-mixed",
        weights="fp16",
        computes="fp16",
        masters="fp32",
        states="fp32",
        gradients="fp16",
        reductions="fp16",
        measured=False,
    ),
    Precision(
        '"16-true"',
        "16-true",
        weights="fp16",
        computes="fp16",
        masters="fp32",
        states="fp32",
        gradients="fp16",
        reductions="fp16",
        buffers="fp16",
        measured=False,
    ),
)


def check_precision(config: Mapping[str, Any], precision: str) -> None:
    """Refuse a DeepSpeed config that speaks of another precision than the Trainer, or of none that it would use.

    Args:
        config: A completed config.
        precision: Lightning's name of the precision.

    Raises:
        ConfigConflictError: They differ; the message names both and what to change.
    """
    if "bfloat16" in config:
        raise ConfigConflictError(
            "The DeepSpeed config has a section 'bfloat16', an old name for 'bf16' that DeepSpeed reads where there's "
            f"no 'bf16' and drops silently where there is one. Call it bf16; the Trainer has precision=\"{precision}\"."
        )
    if config.get("amp", {}).get("enabled", False):
        raise ConfigConflictError(
            "The DeepSpeed config enables amp (NVIDIA Apex), which doesn't go with ZeRO. Leave it out, and pass "
            'Trainer(precision="bf16-mixed").'
        )
    names = ("fp16", "bf16", "torch_autocast")
    for name in names:
        if not isinstance(config.get(name, {}).get("enabled", False), bool):
            raise ConfigConflictError(
                f"The DeepSpeed config sets {name}.enabled to {config[name]['enabled']!r}: true or false is expected, "
                f'and it must fit the Trainer\'s precision="{precision}". Leave the entry out.'
            )
    enabled = {name: bool(config.get(name, {}).get("enabled", False)) for name in names}
    wanted = _WANTED.get(precision)
    for name in ("fp16", "bf16"):
        if enabled[name] and name != wanted:
            example = "16-mixed" if name == "fp16" else "bf16-mixed"
            raise ConfigConflictError(
                f'The DeepSpeed config enables {name}, the Trainer has precision="{precision}". Pass '
                f'Trainer(precision="{example}") or leave {name} out of the config.'
            )
    if wanted is not None and wanted in config and not enabled[wanted]:
        section = config[wanted]
        seen = f"{wanted}.enabled false" if "enabled" in section else f'a section {wanted} without "enabled": true'
        raise ConfigConflictError(
            f'Trainer(precision="{precision}") asks for {wanted}, but the DeepSpeed config has {seen}, so that it '
            f"would train in fp32. {'Add it, or leave' if section and 'enabled' not in section else 'Leave'} the "
            "section out."
        )
    if enabled["torch_autocast"] and wanted is not None:
        raise ConfigConflictError(
            f'The DeepSpeed config enables torch_autocast, which keeps weights in fp32; precision="{precision}" casts '
            f'them to 16 bits, and DeepSpeed would then silently drop autocast. Pass Trainer(precision="32-true") with'
            f" torch_autocast, or leave torch_autocast out."
        )
    _check_masters(config, precision, enabled["bf16"])
    _check_weights_dtype(config, precision, wanted)


def _check_masters(config: Mapping[str, Any], precision: str, bf16: bool) -> None:
    section = config.get("bf16", {})
    masters, states = (section.get(name) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"))
    if (masters or states) and not bf16:
        raise ConfigConflictError(
            f'The DeepSpeed config asks for bf16 masters or states, the Trainer has precision="{precision}", under '
            'which DeepSpeed drops them silently. Add "enabled": true to the section bf16 and pass '
            'Trainer(precision="bf16-mixed"), or leave the section out.'
        )
    if states and not masters:
        raise ConfigConflictError(
            "The DeepSpeed config sets bf16.bf16_optimizer_states without bf16.bf16_master_weights_and_grads: states "
            "in bf16 need masters in bf16. Set both or neither."
        )


def _check_weights_dtype(config: Mapping[str, Any], precision: str, wanted: str | None) -> None:
    asked = config.get("data_types", {}).get("param_dtype")
    if asked is not None and asked != (wanted or "fp32"):
        raise ConfigConflictError(
            f"The DeepSpeed config sets data_types.param_dtype to {asked!r}, the Trainer has "
            f'precision="{precision}", whose weights are {wanted or "fp32"}. Leave param_dtype out.'
        )


def require_deepspeed_precision(plugin: Any) -> None:
    """Refuse a precision plugin that isn't DeepSpeed's: its backward would go past the engine.

    Args:
        plugin: The strategy's precision plugin.

    Raises:
        ConfigConflictError: It is another one.
    """
    # By name, since each of Lightning's packages has its own. The exact base class is what a strategy has before it is
    # given one.
    names = {kind.__name__ for kind in type(plugin).__mro__}
    if "DeepSpeedPrecision" not in names and type(plugin).__name__ != "Precision":
        raise ConfigConflictError(
            f"The Trainer has the plugin {type(plugin).__name__}, which does its casting and its backward past "
            "DeepSpeed's engine. Leave it out of plugins and pass Trainer(precision=...); for torch autocast over fp32 "
            'weights, precision="32-true" and {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}} in the config.'
        )


def keeping_what_is_fp32(
    plugin: Any, config: Mapping[str, Any], *, stock_semantics: bool
) -> AbstractContextManager[None]:
    """While a strategy sets a model up, the plugin's ``convert_module`` is what :func:`converting` makes of it.

    Args:
        plugin: The strategy's precision plugin.
        config: The DeepSpeed config.
        stock_semantics: Whether buffers are cast as stock does, unnamed.
    """
    convert = converting(plugin, config, stock_semantics=stock_semantics)
    return substituted(plugin, "convert_module", convert)


def converting(plugin: Any, config: Mapping[str, Any], *, stock_semantics: bool) -> Callable[[nn.Module], nn.Module]:
    """A plugin's ``convert_module`` that keeps buffers in fp32, or names them, and names weights that can't be kept.

    Args:
        plugin: The strategy's precision plugin; its ``convert_module`` is what casts under "bf16-true" and "16-true".
        config: The DeepSpeed config.
        stock_semantics: Whether buffers are cast as stock does, unnamed.
    """
    convert: Callable[[nn.Module], nn.Module] = plugin.convert_module

    def convert_and_keep(module: nn.Module) -> nn.Module:
        dtype = getattr(plugin, "_desired_dtype", torch.float32)
        if dtype not in _SIXTEEN or stock_semantics:
            return convert(module)
        warn_of_rounded_weights(module, config, dtype)
        _warn_of_partitioned_build(module)
        before = [(n, o, k, b) for n, o, k, b in _buffers(module) if b.dtype not in _SIXTEEN]
        converted = convert(module)
        rounded = []
        for name, owner, key, buffer in before:
            if owner._buffers[key] is buffer:
                continue
            if _is_kept(name, module, config, dtype):
                owner._buffers[key] = buffer
            elif isinstance(owner, nn.modules.batchnorm._NormBase) or not torch.equal(
                buffer.to(dtype).to(buffer), buffer
            ):
                rounded.append(name)
        if rounded:
            rank_zero_warn(
                f'precision="{plugin.precision}" rounds buffers to {_short(dtype)}, as in a plain Trainer: '
                f'{_listed(rounded)}. Pass precision="bf16-mixed", or {{"data_types": {{"buffer_dtype": "fp32"}}}} in '
                "the DeepSpeed config, to keep buffers in fp32; the code that uses them must then cast its results."
            )
        return converted

    return convert_and_keep


def warn_of_rounded_weights(module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Name the weights that were asked to stay in fp32, which Stage 3 in 16 bits can't do.

    Asked by a Transformers model's ``_keep_in_fp32_modules_strict`` (and ``_keep_in_fp32_modules`` for fp16), by
    ``data_types.keep_in_fp32_modules``, or by being fp32 in a model whose other weights are in 16 bits: LoRA adapters
    and norms.

    Args:
        module: The module, before it is cast.
        config: The DeepSpeed config.
        dtype: What weights will be cast to.
    """
    pattern = keep_pattern(module, config, dtype)
    parameters = dict(module.named_parameters())
    mixed = any(p.dtype in _SIXTEEN for p in parameters.values())
    names = [
        name
        for name, p in parameters.items()
        if (pattern is not None and pattern.search(name)) or (mixed and p.dtype == torch.float32)
    ]
    if names:
        masters = "bf16" if config.get("bf16", {}).get("bf16_master_weights_and_grads") else "fp32"
        rank_zero_warn(
            f"Asked to stay in fp32, but cast to {_short(dtype)}, because ZeRO Stage 3 in 16 bits has one dtype for "
            f"all weights: {_listed(names)}. Their masters, which the optimizer updates, are {masters}; forward reads "
            'the rounded copies. To keep them, use Trainer(precision="32-true") with {"torch_autocast": {"enabled": '
            'true, "dtype": "bfloat16"}} in the DeepSpeed config.'
        )


def keep_pattern(module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> re.Pattern[str] | None:
    """What names of tensors are asked to stay in fp32, as Transformers and DeepSpeed 0.19.8 match them.

    Args:
        module: The module that is trained.
        config: The DeepSpeed config; a list in ``data_types.keep_in_fp32_modules`` replaces what models ask for.
        dtype: The training dtype.
    """
    asked = config.get("data_types", {}).get("keep_in_fp32_modules", "auto")
    patterns: set[str] = set()
    if isinstance(asked, list):
        patterns = {name.replace("*", ".*") for name in asked}
    else:
        for path, child in module.named_modules():
            names = set(getattr(child, "_keep_in_fp32_modules_strict", None) or ())
            if dtype == torch.float16:
                names |= set(getattr(child, "_keep_in_fp32_modules", None) or ())
            prefix = rf"^{re.escape(path)}\..*" if path else ""
            patterns |= {prefix + name.replace("*", ".*") for name in names}
    return re.compile("|".join(sorted(patterns))) if patterns else None


def _is_kept(name: str, module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> bool:
    if config.get("data_types", {}).get("buffer_dtype") is not None:
        return True  # DeepSpeed casts it, from its full precision
    pattern = keep_pattern(module, config, dtype)
    if pattern is not None and pattern.search(name):
        return True
    # Transformers loads a model in 16 bits with its buffers in fp32, and its code is written for that.
    parts = name.split(".")[:-1]
    return any(hasattr(module.get_submodule(".".join(parts[:n])), "save_pretrained") for n in range(len(parts) + 1))


def _warn_of_partitioned_build(module: nn.Module) -> None:
    partitioned = any(hasattr(p, "ds_id") for p in module.parameters())
    names = [name for name, _, _, buffer in _buffers(module) if buffer.dtype in _SIXTEEN]
    if partitioned and names:
        rank_zero_warn(
            f"Buffers in 16 bits in a model built under zero.Init (in configure_model), which rounds what is made "
            f"there: {_listed(names)}. Build Transformers models by lightning_zero3's build_from_config, and assign "
            "other buffers after the model is built."
        )


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                yield f"{path}.{key}" if path else key, owner, key, buffer


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def _listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def markdown() -> str:
    """The table as a page's middle part."""
    lines = [
        "| asked for by | weights | computes in | masters | optimizer states | gradients (added up in) | reductions | "
        "buffers | buffers of Transformers models |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in PRECISIONS:
        note = "" if row.measured else " (read in the code, not measured)"
        cells = (row.weights, row.computes, row.masters, row.states, row.gradients, row.reductions, row.buffers)
        lines.append(f"| {row.what}{note} | {' | '.join((*cells, row.buffers_of_transformers))} |")
    return "\n".join(lines) + "\n"
