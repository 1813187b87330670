# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model from its config, partitioned while it is built and with the values that it would have had whole.

The plain constructor under ``deepspeed.zero.Init`` (which Lightning opens around ``configure_model``) gives garbage:
Transformers initialises partitions of size 0, and tensors made in the constructor are rounded to the training dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe.load import load_pretrained
from lightning_zero3.moe.sharded_build import initialize_partitions, outside_zero_init, share_buffers

ModelT = TypeVar("ModelT", bound=nn.Module)


def build_from_config(
    model_class: type[ModelT],
    config: Any,
    weights: str | Path | None = None,
    *,
    allow_unexpected: Sequence[str] = (),
) -> ModelT:
    """Build a model, partition by partition where ``deepspeed.zero.Init`` is active, plainly where it isn't.

    Under ``zero.Init`` no rank ever holds more than its partitions and one module's whole weights. Weights are drawn
    on rank 0 in the order in which the whole model draws them, so a seed gives the same values with and without
    ``zero.Init``; buffers keep their own dtype and are the same on every rank.

    Upstream symbols: ``transformers.initialization.no_init_weights`` (seen in 5.24), which Transformers itself uses in
    ``from_config`` when a global ``HfDeepSpeedConfig`` is alive; ``deepspeed.zero.Init``'s ``top_level_context``,
    ``shutdown_init_context`` and ``restore_init_context``. Expires when the plain constructor works under
    ``zero.Init``.

    Args:
        model_class: A ``PreTrainedModel`` class, e.g. ``Glm4MoeForCausalLM``.
        config: Its config.
        weights: A folder of safetensors, whose values take the place of drawn ones: nothing is drawn that it holds. See
            :func:`lightning_zero3.moe.load.load_pretrained`, which can also be called afterwards.
        allow_unexpected: Patterns of names in the folder that the model may lack.

    Returns:
        The model, in training mode.

    Raises:
        SetupError: The folder's tensors can't be read, or aren't the model's.
        ImportError: ``zero.Init`` is active, and this Transformers can't initialise partitioned weights.
    """
    from deepspeed.runtime.zero import partition_parameters as zero

    if zero.top_level_context is None:
        return _build_whole(model_class, config, weights, allow_unexpected)
    try:
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ImportError(
            f"{model_class.__name__} can't be built in configure_model with this Transformers release, which lacks "
            "no_init_weights: upgrade Transformers, or build the model in the LightningModule's __init__."
        ) from error
    with no_init_weights(), _default_dtype(zero.top_level_context.dtype):
        model = model_class(config)
    with outside_zero_init():
        _give_buffers_their_dtype(model, model_class, config)
    if weights is not None:
        model.tie_weights()  # type: ignore[operator]
        load_pretrained(model, weights, allow_unexpected=allow_unexpected)
    initialize_partitions(model)
    model.tie_weights()  # type: ignore[operator]
    share_buffers(model.buffers())
    return model


class MetaDeviceError(SetupError):
    """A module has tensors on the meta device, which hold no values."""


def meta_tensors(module: nn.Module) -> list[str]:
    """Names of the parameters and buffers that hold no values."""
    return [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]


def refuse_meta_tensors(module: nn.Module) -> None:
    """Refuse a module that has parameters or buffers without values.

    Args:
        module: Usually a LightningModule.

    Raises:
        MetaDeviceError: It has some; the message names them and what to do.
    """
    if names := meta_tensors(module):
        raise MetaDeviceError(
            f"{len(names)} parameters or buffers of {type(module).__name__} are on the meta device and hold no values: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. Neither DeepSpeed nor AutoEP takes such a "
            "model. Build it in configure_model, without torch.device('meta'): there each module is partitioned as "
            "soon as it is built, and no rank ever holds the whole model."
        )


def _build_whole(
    model_class: type[ModelT], config: Any, weights: str | Path | None, allow_unexpected: Sequence[str]
) -> ModelT:
    """The unsharded model: constructed without values, then given them, as the sharded one is.

    The plain constructor draws each layer's values twice, first torch's and then Transformers', so a seed would give
    other values than in a sharded build.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = model_class(config)
    if weights is not None:
        model.tie_weights()  # type: ignore[operator]
        load_pretrained(model, weights, allow_unexpected=allow_unexpected)
    model.init_weights()  # type: ignore[operator]
    return model


def _give_buffers_their_dtype(model: nn.Module, model_class: type[nn.Module], config: Any) -> None:
    """Replace buffers that ``zero.Init`` has cast by ones of the dtype that the constructor gives them.

    They hold NaN until they are initialised: one that nobody initialises must not pass for a value.
    """
    with torch.device("meta"):
        intended = dict(model_class(config).named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.dtype != intended[name].dtype:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = torch.full_like(buffer, torch.nan, dtype=intended[name].dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have parameters made in the run's dtype from the start, instead of cast to it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
