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
}

# Model types for which a preset would silently compute another function.
_REFUSED: dict[str, str] = {
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
        requested: The user's choice, which wins if DeepSpeed knows it.

    Returns:
        Name of a preset of the installed DeepSpeed.

    Raises:
        UnsupportedModelError: No preset is known for the type, or the preset doesn't exist. The message names
            the presets that do and how to choose one.

    >>> resolve_preset("glm4_moe")
    'deepseek_v3'
    """
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names, preset_name_for_hf_model_type

    available = sorted(available_preset_names())
    if requested is not None:
        if requested not in available:
            raise UnsupportedModelError(
                f"expert_parallel_preset={requested!r} is no AutoEP preset of the installed DeepSpeed. It has: "
                f"{', '.join(available)}."
            )
        return requested
    preset = _PRESETS.get(model_type) or preset_name_for_hf_model_type(model_type)
    if preset is not None and preset not in available:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is computed by AutoEP's preset {preset!r}, which the installed DeepSpeed "
            f"lacks. It has: {', '.join(available)}."
        )
    if preset is None:
        why = f": {_REFUSED[model_type]}" if model_type in _REFUSED else ""
        raise UnsupportedModelError(
            f"No AutoEP preset is known to compute model_type={model_type!r}{why}. If one of DeepSpeed's presets does "
            f"({', '.join(available)}), pass it as expert_parallel_preset; else leave expert_parallel_size out."
        )
    return str(preset)
