# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's communication op on CPU machines: found, built once, and never waited for in vain.

``deepspeed.init_distributed`` compiles ``deepspeed_shm_comm`` (C++, half a minute) on its first CPU run. The build is
guarded by a lock file; a process that was killed while compiling or loading leaves it behind, and every later run then
waits for it silently and for ever. :func:`build` compiles ahead of time.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from lightning_zero3 import build_locks

OP_NAME = "deepspeed_shm_comm"
QUIET_BUILD_SECONDS = build_locks.QUIET_BUILD_SECONDS
# A process that finds the op built holds the lock for a moment only.
QUIET_LOAD_SECONDS = 10
SAY_AFTER_SECONDS = 2

# Lightning's, so that its lines look like those around them.
log = logging.getLogger("lightning.pytorch")


class StaleBuildLockError(RuntimeError):
    """A lock file that can't be judged would make this run wait for ever."""


def extensions_dir() -> Path:
    """The folder in which PyTorch keeps compiled extensions (``TORCH_EXTENSIONS_DIR`` or its default)."""
    from torch.utils.cpp_extension import _get_build_directory

    # Upstream symbol: torch.utils.cpp_extension._get_build_directory (torch 2.8 to 2.13). It alone knows the default
    # folder's name, which carries Python's and CUDA's versions. It creates the folder, as the build would.
    return Path(_get_build_directory(OP_NAME, verbose=False))


def make_ninja_visible() -> None:
    """Put the environment's own ``ninja`` first, whether or not the environment is activated.

    Two releases of ninja don't read each other's logs, so a build by one is built again by the other.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    ours = scripts / "ninja"
    found = shutil.which("ninja")
    if ours.exists() and (found is None or Path(found).resolve() != ours.resolve()):
        # An empty entry would mean the current folder.
        os.environ["PATH"] = os.pathsep.join(filter(None, [str(scripts), os.environ.get("PATH")]))


def keep_builds_apart() -> None:
    """Build in a folder of this environment, unless the user has named one.

    PyTorch's default folder is shared by all environments of a user, and each would rebuild what another has built.
    """
    folder = Path(sys.prefix) / "torch_extensions"
    if "TORCH_EXTENSIONS_DIR" not in os.environ and os.access(sys.prefix, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def await_build_lock(
    folder: Path, *, now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait while another process builds the op; clear away a lock whose process is gone.

    Args:
        folder: The op's build folder.
        now: Seconds since the epoch; another clock for tests.
        sleep: Waits for some seconds.

    Raises:
        StaleBuildLockError: Nothing in the folder has changed for longer than a build takes, and the lock is another
            user's, so that it can't be seen whether its process lives.
    """
    lock = folder / "lock"
    limit = QUIET_LOAD_SECONDS if (folder / f"{OP_NAME}.so").exists() else QUIET_BUILD_SECONDS
    said = False
    while lock.exists():
        quiet = now() - build_locks.last_change(folder)
        if not said and quiet > SAY_AFTER_SECONDS:
            log.info(f"Waiting for {lock}: another process compiles or loads DeepSpeed's communication op.")
            said = True
        if quiet > limit and not _is_held(lock):
            # Whoever comes second finds it gone.
            lock.unlink(missing_ok=True)
            warnings.warn(f"Removed {lock}, which a killed process had left behind.", stacklevel=2)
        sleep(0.5)


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock file open, as PyTorch's lock does while it builds."""
    try:
        if lock.stat().st_uid != os.getuid():
            raise StaleBuildLockError(
                f"{lock} belongs to another user and shows no sign of life; DeepSpeed would wait for it for ever. Have "
                "it deleted, or set TORCH_EXTENSIONS_DIR to a folder of your own."
            )
    except FileNotFoundError:
        return False
    return build_locks.holder_of(lock) is not None


def prepare() -> None:
    """Make the op's build possible on this machine and safe to wait for.

    Raises:
        StaleBuildLockError: See :func:`await_build_lock`.
    """
    make_ninja_visible()
    keep_builds_apart()
    folder = extensions_dir()
    await_build_lock(folder)
    if not (folder / f"{OP_NAME}.so").exists():
        log.info("Compiling DeepSpeed's communication op for CPU runs, once in this environment: about half a minute.")


def build() -> bool:
    """Compile the op if this DeepSpeed and this machine use it.

    Returns:
        Whether the op is ready. False on a machine with a GPU, where it isn't used.
    """
    import torch

    if torch.cuda.is_available():
        return False
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    prepare()
    from deepspeed.comm.torch import build_shm_op

    return build_shm_op() is not None
