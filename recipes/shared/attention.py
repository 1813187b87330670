# SPDX-License-Identifier: Apache-2.0
"""Which attention the model computes, and which kernels it finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from shared.settings import Attention

_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def choose(config: Any, attention: Attention) -> None:
    """Have a model of this config compute its attention so.

    Args:
        config: The model's config, before the model is built.
        attention: As in the settings; cudnn is torch's attention under :func:`only_cudnn`.
    """
    config._attn_implementation = "eager" if attention == "eager" else "sdpa"


@contextmanager
def only_cudnn(attention: Attention) -> Iterator[None]:
    """For ``cudnn``: leave torch's attention no other kernel, so that none is taken silently.

    The switches are the process's: activations are computed again in backward, on autograd's own threads, which a
    context around forward wouldn't reach.

    Args:
        attention: As in the settings; others change nothing.
    """
    if attention != "cudnn":
        yield
        return
    backends = torch.backends.cuda
    before = {kernel: getattr(backends, f"{kernel}_sdp_enabled")() for kernel in _KERNELS}
    try:
        for kernel in _KERNELS:
            getattr(backends, f"enable_{kernel}_sdp")(kernel == "cudnn")
        yield
    finally:
        for kernel, enabled in before.items():
            getattr(backends, f"enable_{kernel}_sdp")(enabled)


def describe(config: Any, attention: Attention) -> str:
    """A line about the attention of a run, and whether linear attention has its fast kernels.

    Args:
        config: The model's config.
        attention: As in the settings.
    """
    line = f"Attention: {attention}"
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return line
    # Transformers takes it where it can be imported.
    fast = "flash-linear-attention" if find_spec("fla") else "torch's own (slow; pip install flash-linear-attention)"
    return f"{line}; linear attention: {fast}"
