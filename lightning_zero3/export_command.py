# SPDX-License-Identifier: Apache-2.0
"""The command: a checkpoint's folder and a config to a Hugging Face folder. No GPU, one process."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lightning_zero3.config import SetupError
from lightning_zero3.plan.models import class_for, config_of


def export(
    checkpoint: str | None = None,
    out: str | None = None,
    model_config: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    max_shard_size: str = "5GB",
    base: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    trust_checkpoint: bool = False,
    json: bool = False,
    adapters: Literal["merge", "only"] = "merge",
    adapter_config: str | None = None,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder: ``lightning-zero3 export CHECKPOINT OUT --config DIR``.

    From checkpoints of any number of ranks, with expert and tensor parallelism, in one process and without a GPU.

    Args:
        checkpoint: A folder that the Trainer has saved, or a tag's folder in it.
        out: The folder that is written. It gets this name when it is whole.
        model_config: The config.json of the model that was trained, or a folder with it; by default base's. Tokenizer
            files and generation_config.json in the folder are copied. (Also --model_config. No YAML of options.)
        dtype: fp32 writes the masters; bf16 and fp16 write them rounded.
        max_shard_size: The most bytes of a file, such as 5GB.
        base: The Hugging Face folder that the model was loaded from: its names, its config, and what of it wasn't
            trained (vision, further tokens' prediction) are taken over.
        tokenizer: A folder whose tokenizer files are copied.
        overwrite: Replace an earlier export.
        trust_checkpoint: Run what the checkpoint's files hold beside plain values.
        json: Print one JSON object instead of a line.
        adapters: Of a model with a LoRA of PEFT's: merge writes the model with it in its weights, only the adapter
            alone, which PeftModel.from_pretrained loads.
        adapter_config: An adapter_config.json, or a folder with one, for checkpoints that zero3_fast hasn't saved.

    Returns:
        0.

    Raises:
        SetupError: It can't be exported; the message says why. Nothing is left behind.
    """
    from lightning_zero3.checkpoints.export import export_checkpoint
    from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
    from lightning_zero3.checkpoints.places import UnfitCheckpointError
    from lightning_zero3.checkpoints.unpickling import UntrustedCheckpointError

    if checkpoint is None or out is None:
        raise SetupError("A checkpoint is written to a folder: export CHECKPOINT OUT --config DIR")
    where = model_config or base
    if where is None:
        raise SetupError(
            "--config DIR: the config.json of the model that was trained, or a folder with it; or --base DIR."
        )
    given = [Path(each) for each in (tokenizer, model_config) if each is not None]
    try:
        report = export_checkpoint(
            checkpoint,
            out,
            model_of(where),
            dtype=dtype,
            max_shard_size=max_shard_size,
            base=base,
            copied_from=[each for each in given if not each.is_file()],
            overwrite=overwrite,
            trust=trust_checkpoint,
            adapters=adapters,
            adapter_config=None if adapter_config is None else _fields_of(adapter_config, "adapter_config.json"),
        )
    except (DamagedCheckpointError, UnfitCheckpointError, UntrustedCheckpointError) as error:
        raise SetupError(str(error).replace("trust_checkpoint=True to the strategy", "--trust_checkpoint")) from error
    except OSError as error:
        raise SetupError(f"{out} can't be written: {error}.") from error
    print(json_format.dumps(asdict(report)) if json else report)
    return 0


def model_of(path: str | Path) -> Any:
    """Transformers' model of a config, without values.

    Args:
        path: A config.json, or a folder with one.

    Raises:
        SetupError: There is none, or no such model.
    """
    import torch

    where = _file(path, "config.json")
    config = config_of(_fields_of(path, "config.json"), where)
    model_class = class_for(config, str(where))
    with torch.device("meta"):
        return model_class(config)


def _file(path: str | Path, name: str) -> Path:
    return Path(path) / name if Path(path).is_dir() else Path(path)


def _fields_of(path: str | Path, name: str) -> Any:
    where = _file(path, name)
    try:
        return json_format.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{where} can't be read: {getattr(error, 'strerror', None) or error}.") from error
