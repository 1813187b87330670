"""DeepSpeed's communication op on CPU machines: found, built once, and never waited for in vain.

``deepspeed.init_distributed`` compiles ``deepspeed_shm_comm`` (C++, half a minute) on its first CPU run. The build is
guarded by a lock file; a process that was killed while compiling leaves it behind, and every later run then waits for
it silently and for ever. :func:`build` compiles ahead of time.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from pathlib import Path

OP_NAME = "deepspeed_shm_comm"
# The op compiles in well under a minute on two cores; a lock older than this belongs to no living build.
STALE_AFTER_SECONDS = 15 * 60


class StaleBuildLockError(RuntimeError):
    """A lock file of an abandoned build would make this run wait for ever."""


def extensions_dir() -> Path:
    """The folder in which PyTorch keeps compiled extensions (``TORCH_EXTENSIONS_DIR`` or its default)."""
    from torch.utils.cpp_extension import _get_build_directory

    # Upstream symbol: torch.utils.cpp_extension._get_build_directory (torch 2.8 to 2.13). It alone knows the default
    # folder's name, which carries Python's and CUDA's versions. It creates the folder, as the build would.
    return Path(_get_build_directory(OP_NAME, verbose=False))


def make_ninja_visible() -> None:
    """Let the compiler driver find the environment's own ``ninja`` when the environment isn't activated."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and (Path(scripts) / "ninja").exists():
        # An empty entry would mean the current folder.
        os.environ["PATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PATH")]))


def check_build_lock(folder: Path) -> None:
    """Refuse to run into the lock of a build that nobody is working on any more.

    Args:
        folder: The op's build folder.

    Raises:
        StaleBuildLockError: The lock is older than any build takes.
    """
    lock = folder / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > STALE_AFTER_SECONDS:
        raise StaleBuildLockError(
            f"{lock} is {age / 60:.0f} minutes old: a build of {OP_NAME} was interrupted, and DeepSpeed would wait for"
            " it for ever. Make sure that no other process is compiling, delete that file and run again."
        )


def prepare() -> None:
    """Make the op's build possible on this machine and safe to wait for.

    Raises:
        StaleBuildLockError: See :func:`check_build_lock`.
    """
    make_ninja_visible()
    check_build_lock(extensions_dir())


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
