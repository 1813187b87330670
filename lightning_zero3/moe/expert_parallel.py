# SPDX-License-Identifier: Apache-2.0
"""AutoEP pointed at the Hugging Face model inside a user's module, checked before any process group exists.

DeepSpeed's engine hands its *root* module to AutoEP, which then matches layer names from the root (``model.layers.N``)
and reads the root's ``config``. Under a LightningModule the root is the user's own class: names are longer, the config
is missing or is something else, and the replacement is silently nothing or silently another function. Here AutoEP gets
the Hugging Face model itself, at whatever depth and under whatever attribute it hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero3.capabilities.limits import OUTPUT_RECORDERS
from lightning_zero3.config import SetupError
from lightning_zero3.moe import expert_adapters
from lightning_zero3.moe.hugging_face import find_models, model_type
from lightning_zero3.moe.output_recorders import as_transformers_records, movable_recorders, recorders_can_be_moved
from lightning_zero3.moe.presets import UnsupportedModelError, resolve_preset
from lightning_zero3.moe.router_precision import compute_in_fp32, routers_in_fp32
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology


class NoMoELayerError(SetupError):
    """Expert parallelism was asked for, but there is no MoE layer that it could be applied to."""


@dataclass(frozen=True)
class ExpertParallelTarget:
    """The Hugging Face model that AutoEP works on.

    Args:
        path: Its dotted name inside the root module, empty for the root itself.
        module: The model.
        preset: The AutoEP preset that computes its MoE layers.
    """

    path: str
    module: nn.Module
    preset: str


def find_target(root: nn.Module, requested_preset: str | None = None) -> ExpertParallelTarget:
    """Find the Hugging Face model with MoE layers inside a module.

    Args:
        root: Any module, usually a LightningModule.
        requested_preset: The user's choice of preset, or None.

    Returns:
        The outermost Hugging Face model for which a preset is known.

    Raises:
        NoMoELayerError: There is no Hugging Face model inside.
        UnsupportedModelError: There is none that a preset computes, or there are several.
    """
    models, others = find_models(root, lambda module: _preset_or_reason(module, requested_preset)[0] is not None)
    if not models and not others:
        raise NoMoELayerError(
            f"expert_parallel_size is set, but {type(root).__name__} holds no Hugging Face model (a module whose "
            "`config` has a `model_type`). Build the model in the LightningModule's __init__ or configure_model."
        )
    if not models:
        reasons = [(path, _preset_or_reason(module, requested_preset)[1]) for path, module in others]
        raise UnsupportedModelError("\n".join(f"{path or 'the module itself'}: {reason}" for path, reason in reasons))
    found = [
        ExpertParallelTarget(path, module, resolve_preset(model_type(module), requested_preset))
        for path, module in models
    ]
    if len(found) > 1:
        # A requested preset fits any model by name; what has no experts isn't meant.
        found = [target for target in found if _has_experts(target)] or found
    if len(found) > 1:
        raise UnsupportedModelError(
            "expert_parallel_size is set, and there are several mixture-of-experts models: "
            + ", ".join(f"{target.path} ({model_type(target.module)})" for target in found)
            + ". AutoEP takes one model per engine; keep the others out of this LightningModule."
        )
    return found[0]


def settings(target: ExpertParallelTarget, section: Mapping[str, Any]) -> dict[str, Any]:
    """What AutoEP's section of the config must say about a model.

    Presets match layers by names that a whole causal model has. Where a model's differ, for a text model inside a
    composite one or a model without a head, its layers are named one by one, found by the modules inside them. What the
    user's own section says stays.

    Args:
        target: What :func:`find_target` found.
        section: The ``expert_parallel`` section of the DeepSpeed config.
    """
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset = get_preset(target.preset)
    layers = [
        name
        for name, module in target.module.named_modules()
        if hasattr(module, preset.experts_pattern) and hasattr(module, preset.router_pattern)
    ]
    if section.get("moe_layer_pattern") or all(re.fullmatch(preset.moe_layer_pattern, name) for name in layers):
        return {"preset_model": target.preset}
    return {"preset_model": target.preset, "moe_layer_pattern": "|".join(map(re.escape, layers))}


def check_layers(target: ExpertParallelTarget, section: Mapping[str, Any], topology: Topology) -> int:
    """Let AutoEP's own parser find the MoE layers, and check that the experts can be shared out.

    Args:
        target: What :func:`find_target` found.
        section: The ``expert_parallel`` section of the DeepSpeed config.
        topology: The run's layout.

    Returns:
        The number of MoE layers that will be replaced.

    Raises:
        UnsupportedModelError: The preset doesn't work with the installed Transformers, or its router lacks something.
        NoMoELayerError: The parser finds none.
        SetupError: The number of experts isn't divisible by the expert parallel size.
        AdapterError: PEFT's adapters are where AutoEP can't take them along.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    where = f"{target.path or 'the module'} ({type(target.module).__name__})"
    preset = get_preset(target.preset)
    expert_adapters.check(target.module, preset, where, slices=topology.tensor_parallel_size)
    parser = AutoEP(target.module, parse_autoep_config({**section, **settings(target, section)}))
    try:
        with expert_adapters.laid_bare(target.module, preset):
            layers = parser.ep_parser()
    except ValueError as error:
        if "no MoE layers detected" not in str(error):
            raise
        raise NoMoELayerError(
            f"expert_parallel_size={topology.expert_parallel_size}, but AutoEP's preset {target.preset!r} finds no MoE "
            f"layer in {where}, model_type={model_type(target.module)!r}. Its children are: "
            f"{', '.join(name for name, _ in target.module.named_children()) or 'none'}. Is the model's configuration "
            f"dense, or does another expert_parallel_preset fit it?"
        ) from error
    if not recorders_can_be_moved(target.preset):
        raise UnsupportedModelError(
            f"AutoEP's preset {target.preset!r}, for {where}, doesn't work with this pair of DeepSpeed and "
            f"Transformers: {OUTPUT_RECORDERS.symbol} {OUTPUT_RECORDERS.reason}. Install transformers<5.23, or leave "
            "expert_parallel_size out."
        )
    _refuse_what_routers_lack(target, where)
    for layer in layers:
        topology.require_experts_divide(
            layer.num_experts, f"{target.path + '.' if target.path else ''}{layer.moe_module_name}"
        )
    return len(layers)


def holds_a_model(root: nn.Module) -> bool:
    """Whether a Hugging Face model is built already, at any depth."""
    return bool(find_models(root, lambda _: True)[0])


def check_declared_configs(root: nn.Module, requested_preset: str | None, topology: Topology) -> None:
    """Check a model that isn't built yet by the Hugging Face configs that hang on the module.

    Args:
        root: A LightningModule that builds its model in ``configure_model``.
        requested_preset: The user's choice of preset, or None.
        topology: The run's layout.

    Raises:
        UnsupportedModelError: No preset computes the config's model type.
        NoMoELayerError: The config has no experts.
        SetupError: The number of experts isn't divisible by the expert parallel size.
    """
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    declared = {n: c for n, c in vars(root).items() if isinstance(getattr(c, "model_type", None), str)}
    failures: list[SetupError] = []
    for name, whole in declared.items():
        # A composite config's text model is what has the experts.
        config = getattr(whole, "text_config", None) or whole
        where = f"{type(root).__name__}.{name} (model_type={config.model_type!r})"
        try:
            attribute = get_preset(resolve_preset(config.model_type, requested_preset)).num_experts_attr
        except UnsupportedModelError as failure:
            failures.append(failure)
            continue
        if experts := getattr(config, attribute, None):
            topology.require_experts_divide(experts, where)
        else:
            failures.append(
                NoMoELayerError(
                    f"expert_parallel_size={topology.expert_parallel_size}, but {where} has no {attribute}: a dense "
                    "model?"
                )
            )
    # A dense model beside the one that is meant (a teacher, say) is no fault.
    if failures and len(failures) == len(declared):
        raise failures[0]


def already_replaced(root: nn.Module) -> bool:
    """Whether AutoEP's layers are in place, from an earlier engine."""
    return any(True for _ in _layers(root))


def _layers(root: nn.Module) -> Iterator[nn.Module]:
    return (module for module in root.modules() if getattr(module, "_is_autoep_layer", False))


def keep_eager(root: nn.Module) -> None:
    """Have ``torch.compile`` leave AutoEP's layers as they are, and compile what is around them.

    Their exchange of tokens depends on what routers choose, and ``torch._grouped_mm``'s shape function (torch 2.13)
    takes bf16 only, so that compiling them in fp32 fails. DeepSpeed does the same in ``compile_autoep_non_moe_regions``
    (0.19.8), which it refuses under Stage 3. Expires when that is called under Stage 3 too.

    Args:
        root: A module whose layers AutoEP has replaced.
    """
    for layer in _layers(root):
        if "forward" not in vars(layer):
            layer.forward = torch.compiler.disable(layer.forward)


@contextmanager
def auto_ep_on(target: ExpertParallelTarget) -> Iterator[None]:
    """Make AutoEP work on ``target`` instead of the engine's root module, for the length of ``deepspeed.initialize``.

    Upstream symbol: ``deepspeed.module_inject.auto_ep.AutoEP``, imported by name inside
    ``DeepSpeedEngine._configure_expert_parallel`` (0.19.7, 0.19.8). Reason: see this module's text. Detected by the
    substitution itself (a missing name raises) and by counting replaced layers afterwards. Expires when AutoEP accepts
    a nested model.
    """
    from deepspeed.module_inject import auto_ep
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    upstream, preset = auto_ep.AutoEP, get_preset(target.preset)

    class NestedAutoEP(upstream):  # type: ignore[misc, valid-type]
        """AutoEP that is given the nested model and its config."""

        def __init__(self, _root: nn.Module, config: Any) -> None:
            super().__init__(target.module, config)

        def ep_parser(self) -> list[Any]:
            """The layers to replace, recorded as Transformers records its own; none in a module that has been here."""
            if already_replaced(target.module):
                return []
            with expert_adapters.laid_bare(target.module, preset):
                return as_transformers_records(super().ep_parser(), target.module)

        def replace_moe_layers(self, specs: list[Any], *arguments: Any, **named: Any) -> Any:
            """Replace layers, and have their routers compute as Transformers' own."""
            with expert_adapters.laid_bare(target.module, preset) as adapters:
                in_fp32 = routers_in_fp32(specs, target.module)
                replaced = super().replace_moe_layers(specs, *arguments, **named)
            compute_in_fp32(target.module, in_fp32)
            expert_adapters.put_beside(target.module, preset, adapters)
            return replaced

    with substituted(auto_ep, "AutoEP", NestedAutoEP), movable_recorders(target.preset):
        yield


def _refuse_what_routers_lack(target: ExpertParallelTarget, where: str) -> None:
    """Upstream only warns of what its router doesn't do (``AutoEP.ep_parser``), and trains another function."""
    for attribute in ("router_jitter_noise", "router_z_loss_coef"):
        if value := getattr(target.module.config, attribute, None):
            raise UnsupportedModelError(
                f"{attribute}={value} in the config of {where}: AutoEP's router does without it, so another function "
                f"would be trained. Set {attribute} to 0, or leave expert_parallel_size out."
            )


def _preset_or_reason(module: nn.Module, requested: str | None) -> tuple[str | None, str]:
    try:
        return resolve_preset(model_type(module), requested), ""
    except UnsupportedModelError as reason:
        return None, str(reason)


def _has_experts(target: ExpertParallelTarget) -> bool:
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset = get_preset(target.preset)
    return any(
        hasattr(module, preset.experts_pattern) and hasattr(module, preset.router_pattern)
        for module in target.module.modules()
    )
