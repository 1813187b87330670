# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is one file with a whole state dict (``load_full_weights=True``), read on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_zero3.agreement import together
from lightning_zero3.checkpoints import unpickling
from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
from lightning_zero3.checkpoints.places import UnfitCheckpointError


def read_single_file(path: Any, load: Callable[[bool], dict[str, Any]], *, trust: bool) -> dict[str, Any]:
    """A whole state dict from one file, on all ranks or on none.

    Args:
        path: What Lightning's ``CheckpointIO`` is asked for: a file, or an address.
        load: Reads it; gets ``weights_only``.
        trust: Whether what is in it may be run.

    Raises:
        DamagedCheckpointError: It can't be read.
        UntrustedCheckpointError: It holds something that would have to be run to be read.
        UnfitCheckpointError: It is a folder.
    """
    content: list[dict[str, Any]] = []

    def read() -> None:
        if Path(path).is_dir():
            raise UnfitCheckpointError(
                f"{path} is a folder, and load_full_weights=True reads a single file. Leave it out to load a sharded "
                "checkpoint."
            )
        if Path(path).is_file():
            unpickling.check_sums(Path(path))
        found = unpickling.restricted(path, trust, load)
        if not isinstance(found, Mapping) or "state_dict" not in found:
            raise DamagedCheckpointError(f"{path} isn't a checkpoint of Lightning: it has no state_dict.")
        content.append(dict(found))

    together(read)
    return content[0]
