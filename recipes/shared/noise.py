# SPDX-License-Identifier: Apache-2.0
"""What others log and warn about, and a recipe's user need not read."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What doesn't concern a recipe's user: "`weights_only` was not set", at each checkpoint; and that there's no
# flash-linear-attention, which `attention.describe` says once.
_QUIETER = {
    "lightning.pytorch.utilities.rank_zero": logging.WARNING,
    "lightning.pytorch.trainer.connectors.checkpoint_connector": logging.ERROR,
    "transformers.integrations.hub_kernels": logging.ERROR,
}


@contextmanager
def without_known_noise() -> Iterator[None]:
    """Say what DeepSpeed would find out and warn about; drop what doesn't concern a recipe's user, during a run."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    before = {name: logging.getLogger(name).level for name in _QUIETER}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        for name, level in _QUIETER.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)
