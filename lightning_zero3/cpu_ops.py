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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OP_NAME = "deepspeed_shm_comm"
# A build touches its folder at least this often (the whole op compiles in half a minute on two cores); a process that
# finds it built holds the lock for a moment only.
QUIET_BUILD_SECONDS = 180
QUIET_LOAD_SECONDS = 30


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


def await_build_lock(
    folder: Path, *, now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait while another process builds the op, and refuse to wait for a lock that nobody holds any more.

    Args:
        folder: The op's build folder.
        now: Seconds since the epoch; another clock for tests.
        sleep: Waits for some seconds.

    Raises:
        StaleBuildLockError: The lock is there, and nothing in the folder has changed for longer than a build takes.
    """
    lock = folder / "lock"
    limit = QUIET_LOAD_SECONDS if (folder / f"{OP_NAME}.so").exists() else QUIET_BUILD_SECONDS
    while lock.exists():
        quiet = now() - _last_change(folder)
        if quiet > limit:
            raise StaleBuildLockError(
                f"{lock} has been there for {quiet:.0f} s without a sign of life: a process was killed while it held "
                f"it, and DeepSpeed would wait for it for ever. Make sure that no other process is compiling, delete "
                f"that file and run again."
            )
        sleep(0.5)


def _last_change(folder: Path) -> float:
    """When something in the folder was last modified; now, if it is just being taken away."""
    times = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


def prepare() -> None:
    """Make the op's build possible on this machine and safe to wait for.

    Raises:
        StaleBuildLockError: See :func:`await_build_lock`.
    """
    make_ninja_visible()
    await_build_lock(extensions_dir())


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
