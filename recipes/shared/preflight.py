# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before processes are started, groups made or GPU memory taken, and costs little.

Each check is a function that raises :class:`lightning_zero3.config.SetupError` with what to change. Whether the model
fits its GPUs is in ``gpu_memory.py``, whether a checkpoint fits the run in ``checkpoints.py``.
"""

from __future__ import annotations

import os
import tempfile
from math import gcd
from pathlib import Path
from typing import Any

import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.config import SetupError
from lightning_zero3.moe import parallel_layers
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.topology import Topology
from shared.data import PackedTokens, TokenStream, load_tokens
from shared.settings import Settings


def local_processes() -> int | str:
    """How many processes to use on this node: the launcher's number, every GPU, or two on a machine without one."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return "auto" if torch.cuda.is_available() else 2


def world_size(devices: int | str, num_nodes: int) -> int:
    """The number of ranks: the launcher's, else processes per node times nodes.

    Args:
        devices: Processes on this node, or "auto" for every GPU.
        num_nodes: Nodes.
    """
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    return _on_this_node(devices) * num_nodes


def _on_this_node(devices: int | str) -> int:
    return int(devices) if str(devices).isdigit() else max(1, torch.cuda.device_count())


def check_launcher(devices: int | str, num_nodes: int) -> None:
    """Hold processes per node and nodes against the number of processes that a launcher has started.

    Args:
        devices: Processes on this node, or "auto" for every GPU.
        num_nodes: Nodes.
    """
    names = ["WORLD_SIZE", "SLURM_NTASKS"]
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        names.remove("SLURM_NTASKS")  # a shell in an allocation, for Lightning too: nothing was started by srun
    for name in names:
        started = os.environ.get(name, "")
        if started.isdigit():
            local = _on_this_node(devices)
            if local * num_nodes != int(started):
                raise SetupError(
                    f"--devices {local} on --num_nodes {num_nodes} make {local * num_nodes} processes, but the "
                    f"launcher has started {started} ({name}). Give it and the recipe the same numbers."
                )
            return


def expert_parallel_size(settings: Settings, config: Any, ranks: int) -> int:
    """The size that was asked for, or the largest that divides both ranks and experts.

    Args:
        settings: The run's.
        config: The model's config.
        ranks: The number of ranks.
    """
    return settings.expert_parallel_size or gcd(ranks, shape_of(config).experts)


def check_machine(settings: Settings, name: str) -> None:
    """Refuse the true model, and cuDNN's attention, on a machine without GPUs.

    Args:
        settings: The run's.
        name: What the model is called.
    """
    if torch.cuda.is_available():
        return
    if settings.size == "full":
        raise SetupError(f"{name} (full) needs GPUs, and PyTorch sees none on this machine. --size tiny runs anywhere.")
    if settings.attention == "cudnn":
        raise SetupError(
            "--attention cudnn: cuDNN's kernel needs a GPU, and PyTorch sees none on this machine. Without one: "
            "--attention sdpa, or eager."
        )


def check_data(settings: Settings, config: Any, ranks: int) -> tuple[TokenStream, PackedTokens]:
    """Read the data, and hold it against the model and the number of ranks.

    Args:
        settings: The run's.
        config: The model's config.
        ranks: The number of ranks.

    Returns:
        The tokens, and the samples that they are cut into.
    """
    if settings.sequence_length > config.max_position_embeddings:
        raise SetupError(
            f"--sequence_length {settings.sequence_length}: the model has {config.max_position_embeddings} positions."
        )
    try:
        stream = load_tokens(
            settings.data,
            tokenizer=settings.tokenizer,
            text_field=settings.text_field,
            max_tokens=settings.max_tokens,
        )
        samples = PackedTokens(stream, settings.sequence_length)
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error
    if stream.vocab_size > config.vocab_size:
        raise SetupError(
            f"The tokenizer has {stream.vocab_size:,} tokens, the model's vocabulary {config.vocab_size:,}. Choose a "
            "tokenizer that fits the model."
        )
    lanes = Topology(ranks, tensor_parallel_size=settings.tensor_parallel_size or 1).data_parallel_size
    if len(samples) < lanes * settings.micro_batch_size:
        raise SetupError(
            f"{stream.description}: {len(samples)} samples of {settings.sequence_length} tokens, but one micro-step of "
            f"{lanes} data-parallel ranks takes {lanes * settings.micro_batch_size}. Read more data, or choose a "
            "shorter --sequence_length, a smaller --micro_batch_size or fewer ranks."
        )
    return stream, samples


def check_output(output: Path) -> None:
    """Make the folder for runs, and a file in it.

    Args:
        output: The folder.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise SetupError(f"--output {output} can't be written: {error.strerror}. Choose another folder.") from error


def check_model(model_class: type[Any], config: Any, strategy: Zero3FastStrategy, ranks: int) -> None:
    """Build the model without memory, and check that its layers can be shared out as asked.

    Args:
        model_class: The Hugging Face class.
        config: Its config.
        strategy: The run's; its DeepSpeed config says how.
        ranks: The number of ranks.
    """
    with torch.device("meta"):
        model = model_class(config)
    assert isinstance(strategy.config, dict)
    parallel_layers.targets(model, strategy.config, ranks)
