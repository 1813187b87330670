# SPDX-License-Identifier: Apache-2.0
"""Which of DeepSpeed's AutoEP presets computes what a Hugging Face model computes.

DeepSpeed names the model types of its own presets (``auto_ep_presets/registry.py``); this table adds types that it
doesn't know but whose layers are the same function, and refuses those that only look alike.
"""

from __future__ import annotations

from lightning_zero3.config import SetupError

# Model types that DeepSpeed has no name for, with the preset whose mathematics is theirs.
_PRESETS: dict[str, str] = {
    # Sigmoid scores, a correction bias for the choice only, group-limited top-k, shared experts: DeepSeek-V3's router.
    "glm4_moe": "deepseek_v3",
    # DeepSpeed 0.19.8 names it itself; 0.19.7 lacks the preset, and others would only look alike.
    "minimax_m3_vl_text": "minimax_m3",
}

# Model types for which a preset would silently compute another function.
_REFUSED: dict[str, str] = {
    "minimax_m3_vl": "the experts are in its text model: pass the text-backbone, model_type='minimax_m3_vl_text'",
    "gpt_oss": "its experts carry biases and a clamped activation that no preset has, and none of its layers is found",
    "minimax_m2": "its router scores with a sigmoid and a correction bias, which the mixtral preset that fits its names"
    " does not compute",
}


class UnsupportedModelError(SetupError):
    """AutoEP has no preset that computes what this model computes."""


def register_preset(model_type: str, preset: str) -> None:
    """Say that a Hugging Face ``model_type`` is computed by one of DeepSpeed's AutoEP presets.

    Args:
        model_type: ``config.model_type`` of the Hugging Face model.
        preset: Name of the preset, e.g. ``"deepseek_v3"``.

    >>> register_preset("my_moe", "deepseek_v3")
    >>> resolve_preset("my_moe")
    'deepseek_v3'
    """
    _PRESETS[model_type] = preset


def resolve_preset(model_type: str, requested: str | None = None) -> str:
    """Find the preset for a model type.

    Args:
        model_type: ``config.model_type`` of the Hugging Face model.
        requested: The user's choice, for a type of which nothing is known.

    Returns:
        Name of a preset of the installed DeepSpeed.

    Raises:
        UnsupportedModelError: No preset is known for the type, the preset doesn't exist, or it is known to compute
            another function than the type. The message names the presets that exist and how to choose one.

    >>> resolve_preset("glm4_moe")
    'deepseek_v3'
    """
    from deepspeed.module_inject.auto_ep_presets.registry import (
        available_preset_names,
        preset_name_for_hf_model_type,
        unsupported_preset_for_hf_model_type,
    )

    available = sorted(available_preset_names())
    if requested is not None and requested not in available:
        raise UnsupportedModelError(
            f"expert_parallel_preset={requested!r} is no AutoEP preset of the installed DeepSpeed. It has: "
            f"{', '.join(available)}."
        )
    preset = _PRESETS.get(model_type) or preset_name_for_hf_model_type(model_type)
    if preset is not None and preset not in available:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is computed by AutoEP's preset {preset!r}, which the installed DeepSpeed "
            f"lacks. It has: {', '.join(available)}."
        )
    if preset is not None and requested not in (None, preset):
        raise UnsupportedModelError(
            f"expert_parallel_preset={requested!r} computes another function than model_type={model_type!r}, whose "
            f"preset is {preset!r}: leave expert_parallel_preset out. If you know better, say so with "
            "lightning_zero3.moe.presets.register_preset."
        )
    if preset is not None:
        return str(preset)
    why = _REFUSED.get(model_type)
    if why is None and (unsupported := unsupported_preset_for_hf_model_type(model_type)) is not None:
        why = unsupported[1].unsupported_hf_model_type_notes[model_type]
    if requested is not None and why is None:
        return requested
    if why is None:
        raise UnsupportedModelError(
            f"No AutoEP preset is known to compute model_type={model_type!r}. If one of DeepSpeed's presets does "
            f"({', '.join(available)}), pass it as expert_parallel_preset; else leave expert_parallel_size out."
        )
    raise UnsupportedModelError(
        f"No AutoEP preset computes model_type={model_type!r}: {why}. Leave expert_parallel_size out; or, for a model "
        f"that differs from Transformers' own, register one of DeepSpeed's presets ({', '.join(available)}) with "
        "lightning_zero3.moe.presets.register_preset."
    )
