# SPDX-License-Identifier: Apache-2.0
"""torch: a build that was killed leaves its lock, and whoever needs the op afterwards waits for ever."""

import subprocess
import sys
import threading

from reproduce import run

from torch.utils.file_baton import FileBaton

KILLED = """
import os, signal
from torch.utils.file_baton import FileBaton

assert FileBaton("lock").try_acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
SECONDS = 5


def check():
    # What torch.utils.cpp_extension.load does around a build, in a process that is killed and in one that comes later.
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    baton = FileBaton("lock")
    if baton.try_acquire():
        return False, "the lock of a killed process can be taken"
    waiting = threading.Thread(target=baton.wait, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    return (
        waiting.is_alive(),
        f"the process that held the lock is dead; another one still waits after {SECONDS} seconds",
    )


if __name__ == "__main__":
    run(check)
