# SPDX-License-Identifier: Apache-2.0
"""What tests of saving have in common, for functions that run on ranks."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.checkpoints.saver import CheckpointNotSavedError, Request, Saver

ZERO = {"stage": 3, "stage3_param_persistence_threshold": 40, "sub_group_size": 200}


def ours(**arguments: Any) -> Zero3FastStrategy:
    return Zero3FastStrategy({"zero_optimization": dict(ZERO)}, **arguments)


def rank() -> int:
    return torch.distributed.get_rank()


def is_last_rank() -> bool:
    return rank() == torch.distributed.get_world_size() - 1


@contextmanager
def no_room_for_files(size: int = 2048) -> Iterator[None]:
    """The kernel lets this process write no file beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save(saver_: Saver, engine: Any, path: Path, **arguments: Any) -> None:
    background = arguments.pop("background", False)
    request = Request(path=path, client_state={"said": "x"}, layout={"ranks": 1}, **arguments)
    saver_.save(engine, request, background=background)


def refused(save_it: Any) -> str:
    with pytest.raises(CheckpointNotSavedError) as caught:
        save_it()
    return str(caught.value)
