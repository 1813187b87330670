# SPDX-License-Identifier: Apache-2.0
"""Reading a file of a checkpoint without running what is in it: torch's weights-only unpickler, with an allow-list.

A pickle may call any function while it is read, so a checkpoint from elsewhere is a program from elsewhere. DeepSpeed
reads its files without a restriction (``TorchCheckpointEngine.load``, 0.19.7, 0.19.8). What real checkpoints hold
beside tensors and plain Python values is short, and listed here.

Upstream symbols: ``numpy.core.multiarray._reconstruct`` and ``scalar``, in whose words NumPy's arrays are pickled
(NumPy 1 and 2, whose modules have other names; both are allowed). Detected by tests. Expires when DeepSpeed loads with
``weights_only=True``.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from lightning_zero3.checkpoints.manifest import DamagedCheckpointError

_CHUNK = 1 << 20
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_CLASS = re.compile(r"<class '([\w.]+)'>")
# Modules that torch's unpickler never takes anything from, whatever is allowed.
_NEVER = ("sys", "os", "posix", "nt")


class UntrustedCheckpointError(RuntimeError):
    """A file holds something that would have to be run to be read; the message names the file and what it is."""


def allowed() -> list[Any]:
    """Classes that checkpoints of DeepSpeed and Lightning hold, beside those that torch allows by itself.

    Whatever the user has added by ``torch.serialization.add_safe_globals`` is allowed too.
    """
    import numpy as np
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero import config, offload_config
    from deepspeed.utils.tensor_fragment import fragment_address

    # The loss scaler, the stage, and devices that a config dict names by an enumeration; a Universal Checkpoint's
    # addresses.
    deepspeeds = [
        loss_scaler.LossScaler,
        loss_scaler.DynamicLossScaler,
        config.ZeroStageEnum,
        offload_config.OffloadDeviceEnum,
        fragment_address,
    ]
    # Hyperparameters are paths and namespaces as often as numbers. From Python 3.13 on, paths have another home.
    paths = [pathlib.PosixPath, pathlib.PurePosixPath]
    hyperparameters = [argparse.Namespace, *((each, f"pathlib.{each.__name__}") for each in paths)]
    # Random states and metrics: arrays, numbers and their types. NumPy 1 has them under another name.
    multiarray = getattr(np, "_core", None) or np.core
    functions = [multiarray.multiarray._reconstruct, multiarray.multiarray.scalar]
    types = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdFDSU"}
    named = [
        (each, f"{home}.multiarray.{each.__name__}") for each in functions for home in ("numpy.core", "numpy._core")
    ]
    return [*deepspeeds, *hyperparameters, *paths, np.ndarray, np.dtype, *types, *functions, *named]


def read(path: Path, *, trust: bool, mapped: bool = False, map_location: Any = "cpu") -> Any:
    """What ``torch.save`` has written to a file.

    Args:
        path: The file.
        trust: Whether anything in it may be run.
        mapped: Whether tensors stay in the file until they are used. They change, or the process ends, if somebody
            writes to the file meanwhile: for what is used up at once.
        map_location: As ``torch.load``'s.

    Raises:
        UntrustedCheckpointError: Something in it isn't on the list.
        DamagedCheckpointError: It can't be read.
    """
    mapped = mapped and zipfile.is_zipfile(path)
    return restricted(path, trust, lambda only: torch.load(path, map_location, weights_only=only, mmap=mapped))


def restricted(path: Path | str, trust: bool, load: Callable[[bool], Any]) -> Any:
    """Call something that reads a file by ``torch.load``, with the allow-list, and say what went wrong with which file.

    Args:
        path: What the messages call the file.
        trust: Whether anything in it may be run.
        load: Gets ``weights_only``.

    Raises:
        UntrustedCheckpointError: Something in it isn't on the list.
        DamagedCheckpointError: It can't be read.
    """
    try:
        # On leaving, torch forgets whatever it was given here, the user's own included if it was given again.
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([each for each in allowed() if each not in known]):
            return load(not trust)
    except FileNotFoundError:
        raise
    except MemoryError:
        raise
    except UnpicklingError as error:
        if trust:
            raise DamagedCheckpointError(f"{path} can't be read: {_what(error)}.") from error
        raise UntrustedCheckpointError(_untrusted(path, str(error))) from None
    except Exception as error:
        # A damaged file can end in anything: what a pickle calls for, zip's own errors, torch's.
        raise DamagedCheckpointError(f"{path} can't be read: {_what(error)}.") from error


def _untrusted(path: Path | str, text: str) -> str:
    by_name, of_class = _GLOBAL.search(text), _CLASS.findall(text)
    remedy = ""
    if by_name is not None and by_name[1].split(".")[0] not in _NEVER:
        remedy = f"Or allow that one: import it, and call torch.serialization.add_safe_globals([{by_name[1]}]) before. "
    name = by_name[1] if by_name is not None else of_class[-1] if of_class else f"something else ({_short(text)})"
    return (
        f"{path} holds {name}, which isn't on the list of what may be in a checkpoint: reading it could run any code. "
        f"Nothing has been loaded. If you trust where the file comes from, pass trust_checkpoint=True to the strategy, "
        f"or weights_only=False to fit, validate, test or predict. {remedy}".rstrip()
    )


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(str(error))}"


def _short(text: str) -> str:
    """Torch's own text is a page long, and begins with what all of them have in common."""
    return text.split("WeightsUnpickler error: ")[-1].strip().split("\n")[0].rstrip(".")[:300]


def check_sums(path: Path, *, own_name: bool = False) -> bool:
    """Compare the contents of a file of ``torch.save`` with the sums (CRC-32) that it holds itself.

    torch reads past them.

    Args:
        path: The file.
        own_name: Whether the file must still have the name under which it was written, which is inside it: a shard of
            another rank, put in place of this one, hasn't.

    Returns:
        Whether there are sums: older formats and ``set_crc32_options(False)`` have none.

    Raises:
        DamagedCheckpointError: They differ, the file isn't whole, or it was written under another name.
    """
    try:
        if not zipfile.is_zipfile(path):
            return _is_of_the_old_format(path)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            for entry in entries:
                _check_entry(archive, entry, path)
            if not entries:
                raise DamagedCheckpointError(f"{path} is empty inside.")
            written_as = entries[0].filename.split("/")[0]
            if own_name and written_as not in (path.stem, "archive"):
                raise DamagedCheckpointError(
                    f"{path} was written as {written_as}{path.suffix}: it is another rank's file, put in place of "
                    "this one."
                )
            return any(entry.CRC for entry in entries)
    except FileNotFoundError:
        raise
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is damaged: {_what(error)}.") from error


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise DamagedCheckpointError(
            f"{path} is damaged: {entry.filename} is compressed, and torch compresses nothing."
        )
    if entry.CRC == 0:
        return
    with archive.open(entry) as file:
        while file.read(_CHUNK):
            pass


def _is_of_the_old_format(path: Path) -> bool:
    """Nothing to compare with, but the first bytes tell a file of the old format from one that is cut short."""
    with path.open("rb") as file:
        if not _begins_as_a_pickle(file):
            raise DamagedCheckpointError(
                f"{path} is damaged: it is no file of torch.save, or only the beginning of one."
            )
    return False


def _begins_as_a_pickle(file: IO[bytes]) -> bool:
    return file.read(1) == b"\x80"
