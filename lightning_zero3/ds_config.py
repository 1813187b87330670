# SPDX-License-Identifier: Apache-2.0
"""The only writer of the DeepSpeed config dict: user's dict + arguments + options in, one checked dict out.

The user's dict is never changed. Where it and an argument speak of the same setting they must agree; stock Lightning
lets the dict win silently.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

from lightning_zero3.config import ConfigConflictError, Zero3Options
from lightning_zero3.precision import check_precision

Config = dict[str, Any]
Path = tuple[str, ...]

_ZERO = "zero_optimization"
_ACTIVATIONS = "activation_checkpointing"
_BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")

# Arguments of Lightning's DeepSpeedStrategy and where they stand in a DeepSpeed config. The offload arguments are
# apart, since one argument speaks of a whole section.
ARGUMENT_PATHS: Mapping[str, tuple[Path, ...]] = {
    "zero_allow_untested_optimizer": (("zero_allow_untested_optimizer",),),
    "logging_batch_size_per_gpu": (("train_micro_batch_size_per_gpu",),),
    "sub_group_size": ((_ZERO, "sub_group_size"),),
    "contiguous_gradients": ((_ZERO, "contiguous_gradients"),),
    "overlap_comm": ((_ZERO, "overlap_comm"),),
    "allgather_partitions": ((_ZERO, "allgather_partitions"),),
    "reduce_scatter": ((_ZERO, "reduce_scatter"),),
    "allgather_bucket_size": ((_ZERO, "allgather_bucket_size"),),
    "reduce_bucket_size": ((_ZERO, "reduce_bucket_size"),),
    "partition_activations": ((_ACTIVATIONS, "partition_activations"),),
    "cpu_checkpointing": ((_ACTIVATIONS, "cpu_checkpointing"),),
    "contiguous_memory_optimization": ((_ACTIVATIONS, "contiguous_memory_optimization"),),
    "synchronize_checkpoint_boundary": ((_ACTIVATIONS, "synchronize_checkpoint_boundary"),),
    "block_size": (("aio", "block_size"),),
    "queue_depth": (("aio", "queue_depth"),),
    "single_submit": (("aio", "single_submit"),),
    "overlap_events": (("aio", "overlap_events"),),
    "thread_count": (("aio", "thread_count"),),
    "loss_scale": (("fp16", "loss_scale"),),
    "initial_scale_power": (("fp16", "initial_scale_power"),),
    "loss_scale_window": (("fp16", "loss_scale_window"),),
    "hysteresis": (("fp16", "hysteresis"),),
    "min_loss_scale": (("fp16", "min_loss_scale"),),
}
OFFLOAD_ARGUMENT_PATHS: Mapping[str, tuple[Path, ...]] = {
    "offload_optimizer_device": ((_ZERO, "offload_optimizer", "device"),),
    "optimizer_buffer_count": ((_ZERO, "offload_optimizer", "buffer_count"),),
    "offload_params_device": ((_ZERO, "offload_param", "device"),),
    "params_buffer_count": ((_ZERO, "offload_param", "buffer_count"),),
    "params_buffer_size": ((_ZERO, "offload_param", "buffer_size"),),
    "max_in_cpu": ((_ZERO, "offload_param", "max_in_cpu"),),
    "nvme_path": ((_ZERO, "offload_optimizer", "nvme_path"), (_ZERO, "offload_param", "nvme_path")),
    "pin_memory": ((_ZERO, "offload_optimizer", "pin_memory"), (_ZERO, "offload_param", "pin_memory")),
}
_OFFLOAD_SECTIONS: Mapping[str, Path] = {
    "offload_optimizer": (_ZERO, "offload_optimizer"),
    "offload_parameters": (_ZERO, "offload_param"),
}


def complete(
    base: Mapping[str, Any],
    arguments: Mapping[str, Any],
    options: Zero3Options,
    *,
    argument_defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Join a config dict with the arguments and options that were given beside it.

    Args:
        base: A DeepSpeed config, the user's or Lightning's default; it is copied, not changed.
        arguments: ``DeepSpeedStrategy`` arguments that the user passed explicitly. Empty when ``base`` was made from
            them.
        options: This package's options.
        argument_defaults: ``DeepSpeedStrategy``'s defaults, for the details of an offload that an argument asks for.

    Returns:
        A new dict with stage 3, what the arguments and options ask for, and the defaults that a bare dict lacks.

    Raises:
        ConfigConflictError: The dict and an argument or option differ; the message names both.

    >>> complete({"zero_optimization": {"stage": 3}}, {}, Zero3Options())["zero_allow_untested_optimizer"]
    True
    >>> complete({"zero_optimization": {"stage": 2}}, {}, Zero3Options())
    Traceback (most recent call last):
    ...
    lightning_zero3.config.ConfigConflictError: zero3_fast is ZeRO stage 3, but the DeepSpeed config sets \
zero_optimization.stage to 2. Set it to 3 or leave it out; for stage 2 use Trainer(strategy="deepspeed_stage_2").
    """
    config: Config = copy.deepcopy(dict(base))
    _require_sections_are_dicts(config)
    _set_stage(config)
    _merge_offload_sections(config, arguments, argument_defaults or {})
    for argument, value in arguments.items():
        for path in ARGUMENT_PATHS.get(argument, ()):
            # Lightning writes the fp16 section from the Trainer's precision, with these very arguments in it.
            if path[0] != "fp16" or "fp16" in config:
                _merge(config, path, value, f"{argument}={value!r}")
    _set_expert_parallel(config, options)
    _set_tensor_parallel(config, options)
    # Lightning sets this for its own configs only, and both engines fail on a torch optimizer without it.
    config.setdefault("zero_allow_untested_optimizer", True)
    if _section(config, (_ZERO, "offload_optimizer")):
        # Upstream refuses any optimizer but CPUAdam here; a user's own works too, it is only slower.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def check_against_trainer(
    config: Mapping[str, Any], *, trainer: Any, world_size: int, precision: str, micro_batch_size: int | None = None
) -> None:
    """Find settings on which the config dict and the Trainer differ, before anything is set up.

    Args:
        config: A completed config.
        trainer: A Lightning Trainer; its ``accumulate_grad_batches`` and ``gradient_clip_val`` are read.
        world_size: Number of ranks.
        precision: Lightning's name of the precision, e.g. ``"bf16-mixed"``.
        micro_batch_size: What Lightning will fill in where the config has no ``train_micro_batch_size_per_gpu``.

    Raises:
        ConfigConflictError: They differ; the message names both and what to change.
    """
    steps = config.get("gradient_accumulation_steps")
    if steps not in (None, "auto", trainer.accumulate_grad_batches):
        raise ConfigConflictError(
            f"The DeepSpeed config sets gradient_accumulation_steps to {steps}, the Trainer accumulates "
            f"{trainer.accumulate_grad_batches}. Pass Trainer(accumulate_grad_batches={steps}) or leave the entry out."
        )
    clipping = config.get("gradient_clipping")
    if clipping not in (None, "auto") and trainer.gradient_clip_val not in (None, clipping):
        raise ConfigConflictError(
            f"The DeepSpeed config sets gradient_clipping to {clipping}, the Trainer gradient_clip_val="
            f"{trainer.gradient_clip_val}. Leave one of them out."
        )
    accumulates = f"accumulate_grad_batches {trainer.accumulate_grad_batches}"
    _check_batch_size(config, micro_batch_size, trainer.accumulate_grad_batches, accumulates, world_size)
    check_precision(config, precision)
    _refuse_fast_init(config)


def settle_trainer_values(config: MutableMapping[str, Any]) -> None:
    """Remove entries that Lightning fills in from the Trainer and refuses to find there already.

    Upstream: ``DeepSpeedStrategy._format_batch_size_and_grad_accum_config`` raises on
    ``gradient_accumulation_steps`` whatever its value; :func:`check_against_trainer` has shown them to be equal.
    """
    config.pop("gradient_accumulation_steps", None)
    if tensor_parallel_section(config) is not None:
        # Upstream counts every rank as a data-parallel one; `engine.py` sets the right number afterwards.
        config.pop("train_batch_size", None)
    for name in ("gradient_clipping", *_BATCH_SIZES):
        if config.get(name) == "auto":
            del config[name]


def settle_without_trainer(config: MutableMapping[str, Any], *, world_size: int, precision: str, clip: bool) -> None:
    """Check what :func:`check_against_trainer` checks, and settle what Lightning fills in from a Trainer, for Fabric.

    Args:
        config: A completed config.
        world_size: Number of ranks.
        precision: Lightning's name of the precision.
        clip: Whether a config that doesn't speak of clipping clips to DeepSpeed's default of 1.0, as stock Fabric does.

    Raises:
        ConfigConflictError: Entries differ from each other or from the precision.
    """
    for name in ("gradient_accumulation_steps", "gradient_clipping", *_BATCH_SIZES):
        if config.get(name) == "auto":
            del config[name]
    steps = config.get("gradient_accumulation_steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigConflictError(
            f"The DeepSpeed config sets gradient_accumulation_steps to {steps!r}: a whole number, 1 or more, is "
            "expected, or nothing."
        )
    _check_batch_size(config, 1, steps, f"gradient_accumulation_steps {steps}", world_size)
    check_precision(config, precision)
    _refuse_fast_init(config)
    if tensor_parallel_section(config) is not None:
        config.pop("train_batch_size", None)  # as in `settle_trainer_values`
    if not clip:
        config.setdefault("gradient_clipping", 0.0)


def inference_config(config: Mapping[str, Any]) -> Config:
    """The part of a training config that an engine for validate, test or predict needs.

    Upstream: ``DeepSpeedStrategy._initialize_deepspeed_inference`` builds the same, but drops ``torch_autocast``, the
    sections of expert and tensor parallelism, and how buffers are kept.
    """
    kept = ("fp16", "bf16", "torch_autocast", "data_types", "zero_allow_untested_optimizer", _ZERO)
    parallel = ("expert_parallel", "tensor_parallel", "use_data_before_expert_parallelism")
    found = copy.deepcopy({name: config[name] for name in (*kept, *parallel) if name in config})
    return {"train_micro_batch_size_per_gpu": 1, **found}


def expert_parallel_section(config: Mapping[str, Any]) -> Config | None:
    """The AutoEP section of a config, or None where it is absent or switched off."""
    section: Config | None = config.get("expert_parallel")
    return section if section and section.get("enabled", False) else None


def tensor_parallel_section(config: Mapping[str, Any]) -> Config | None:
    """The AutoTP section of a config, or None where it is absent or switched off."""
    section: Config | None = config.get("tensor_parallel")
    return section if section and section.get("autotp_size", 0) > 1 else None


def with_parallel_layers(
    config: Mapping[str, Any],
    *,
    experts: Mapping[str, Any] | None = None,
    partition: Mapping[str, Any] | None = None,
) -> Config:
    """A config with what has been found out about the model: its MoE layers, and how its layers are split.

    Args:
        config: A completed config.
        experts: Entries of the AutoEP section, or None.
        partition: AutoTP's ``partition_config``, or None.
    """
    found = dict(config)
    if experts is not None:
        found["expert_parallel"] = {**found["expert_parallel"], **experts}
    if partition is not None:
        found["tensor_parallel"] = {"partition_config": dict(partition), **found["tensor_parallel"]}
    return found


def _require_sections_are_dicts(config: Mapping[str, Any]) -> None:
    parallel = ("expert_parallel", "tensor_parallel")
    for name in (_ZERO, _ACTIVATIONS, "aio", "fp16", "bf16", *parallel, "torch_autocast", "data_types", "amp"):
        if name in config:
            _require_dict(config[name], name)
    for path in _OFFLOAD_SECTIONS.values():
        section = _section(config, path)
        if section is not None:
            _require_dict(section, ".".join(path))


def _require_dict(section: Any, name: str) -> None:
    if not isinstance(section, Mapping):
        raise ConfigConflictError(
            f"The DeepSpeed config's {name!r} is {section!r}: a dict of settings is expected there."
        )


def _set_stage(config: Config) -> None:
    stage = config.setdefault(_ZERO, {}).setdefault("stage", 3)
    # DeepSpeed takes the number in a string too; Lightning's `zero_stage_3` does not, and would build the model whole.
    if stage not in (3, "3"):
        other = f' for stage {stage} use Trainer(strategy="deepspeed_stage_{stage}").' if stage in (1, 2) else ""
        raise ConfigConflictError(
            f"zero3_fast is ZeRO stage 3, but the DeepSpeed config sets zero_optimization.stage to {stage}. Set it to"
            f" 3 or leave it out{';' if other else '.'}{other}"
        )
    config[_ZERO]["stage"] = 3


def _merge_offload_sections(config: Config, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    details = {**defaults, **arguments}
    for argument, section_path in _OFFLOAD_SECTIONS.items():
        section, wanted = _section(config, section_path), arguments.get(argument)
        is_on = bool(section) and section.get("device", "none") != "none"
        if wanted is not None and wanted != is_on and section is not None:
            raise ConfigConflictError(
                f"{argument}={wanted}, but the DeepSpeed config has {'.'.join(section_path)}={section!r}. Leave one of "
                "them out."
            )
        paths = {
            name: path for name, all_ in OFFLOAD_ARGUMENT_PATHS.items() for path in all_ if path[:2] == section_path
        }
        if wanted and section is None:
            config[_ZERO][section_path[-1]] = {
                "device": "cpu",
                **{path[-1]: details[name] for name, path in paths.items() if name in details},
            }
        elif is_on:
            # A detail of an offload that nobody asked for has nowhere to go, in stock Lightning as here.
            for name, path in paths.items():
                if name in arguments:
                    _merge(config, path, arguments[name], f"{name}={arguments[name]!r}")


def _set_expert_parallel(config: Config, options: Zero3Options) -> None:
    size = options.expert_parallel_size
    if size is None:
        return
    section = config.setdefault("expert_parallel", {})
    _merge(config, ("expert_parallel", "enabled"), True, f"expert_parallel_size={size}")
    _merge(config, ("expert_parallel", "autoep_size"), size, f"expert_parallel_size={size}")
    preset = options.expert_parallel_preset
    if preset is not None and section.get("preset_model") is None:
        section["preset_model"] = preset
    elif preset is not None:
        _merge(config, ("expert_parallel", "preset_model"), preset, f"expert_parallel_preset={preset!r}")


def _set_tensor_parallel(config: Config, options: Zero3Options) -> None:
    size = options.tensor_parallel_size
    if size is not None:
        _merge(config, ("tensor_parallel", "autotp_size"), size, f"tensor_parallel_size={size}")
    tensor, experts = tensor_parallel_section(config), expert_parallel_section(config)
    if tensor is not None and experts is not None and experts.get("autoep_size", 1) == 1:
        raise ConfigConflictError(
            f"tensor_parallel_size={tensor['autotp_size']} with expert_parallel_size=1: DeepSpeed's AutoEP layers "
            "would count each token's gradients once per tensor-parallel rank. Make expert_parallel_size 2 or more, or "
            "leave it out."
        )
    if tensor is not None and experts is not None:
        sizes = f"tensor_parallel_size={tensor['autotp_size']}, expert_parallel_size={experts.get('autoep_size', 1)}"
        _refuse_offload(config, sizes)


def _refuse_offload(config: Config, sizes: str) -> None:
    """Say early what DeepSpeed says in its engine: it has no offload under both parallelisms at once (0.19.8)."""
    for argument, path in _OFFLOAD_SECTIONS.items():
        section = _section(config, path)
        if section and section.get("device", "none") != "none":
            raise ConfigConflictError(
                f"{sizes} and {argument}: DeepSpeed offloads under one of the two "
                f"only. Leave {argument} ({'.'.join(path)}) out, and share the model out over more ranks instead; or "
                "leave out one of the two sizes."
            )


def _refuse_fast_init(config: Mapping[str, Any]) -> None:
    """Refuse to read masters from swapped weights at any offset, which fails without a word (0.19.7, 0.19.8).

    The same fault as in :mod:`lightning_zero3.optimizer.swapped_gradients`, in ``_swap_in_fp16_params``. Expires when
    upstream reads through aligned memory.
    """
    optimizer, parameters = (_section(config, (_ZERO, name)) or {} for name in ("offload_optimizer", "offload_param"))
    if optimizer.get("fast_init") and optimizer.get("device") == parameters.get("device") == "nvme":
        raise ConfigConflictError(
            "zero_optimization.offload_optimizer.fast_init with optimizer and parameters on NVMe: DeepSpeed fails to "
            "read some weights back, and trains from whatever lies in the buffer. Leave fast_init out."
        )


def _check_batch_size(
    config: Mapping[str, Any], loaders: int | None, accumulate: int, accumulates: str, world_size: int
) -> None:
    total, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    micro = loaders if micro in (None, "auto") else micro
    if not isinstance(total, int) or not isinstance(micro, int):
        return
    lanes = world_size // max(1, config.get("tensor_parallel", {}).get("autotp_size", 1))
    expected = micro * accumulate * lanes
    if total != expected:
        counted = "ranks" if lanes == world_size else "data-parallel ranks"
        raise ConfigConflictError(
            f"The DeepSpeed config sets train_batch_size to {total}, but train_micro_batch_size_per_gpu {micro} × "
            f"{accumulates} × {lanes} {counted} is "
            f"{expected}. Leave train_batch_size out."
        )


def _section(config: Mapping[str, Any], path: Path) -> Any:
    found: Any = config
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _merge(config: Config, path: Path, value: Any, source: str) -> None:
    """Write a value where the dict is silent; raise where it says something else."""
    section: Any = config
    for key in path[:-1]:
        section = section.setdefault(key, {})
    if section.get(path[-1], "auto") not in ("auto", value):
        raise ConfigConflictError(
            f"{source}, but the DeepSpeed config sets {'.'.join(path)} to {section[path[-1]]!r}. Leave one of them out."
        )
    section[path[-1]] = value
