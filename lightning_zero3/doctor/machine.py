# SPDX-License-Identifier: Apache-2.0
"""The compiler, ninja and the links between GPUs and machines: asked of programs and of the kernel."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PROGRAM_SECONDS = 30


@dataclass(frozen=True)
class Tool:
    """A program that compiles DeepSpeed's ops.

    Args:
        name: What it is.
        path: Where it was found, or None.
        version: Its first line.
        problem: What is wrong with it; empty if nothing.
        remedy: What to do about that.
    """

    name: str
    path: str | None
    version: str
    problem: str = ""
    remedy: str = ""


def compiler() -> Tool:
    """The C++ compiler that torch would use (``CXX``, else ``c++``), tried on a program of two lines."""
    remedy = "install one (apt-get install g++, or conda install gxx) or set CXX to its path"
    said = os.environ.get("CXX", "")
    try:
        command = shlex.split(said) or ["c++"]
    except ValueError as error:
        return Tool("C++ compiler", None, "", f"CXX is {said!r}: {error}", remedy)
    path = shutil.which(command[0])
    if path is None:
        return Tool("C++ compiler", None, "", f"no {command[0]} in PATH", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tried.cpp"
        source.write_text("#include <atomic>\nint main() { std::atomic<int> i{0}; return i; }\n")
        failed, said = _run([*command, "-std=c++17", str(source), "-o", str(source.with_suffix(".out"))])
    problem = f"{path} can't compile a program of two lines: {said.strip()[-300:]}" if failed else ""
    return Tool("C++ compiler", path, _first_line([*command, "--version"]), problem, remedy if failed else "")


def ninja() -> Tool:
    """The build program that torch calls; it has to be in ``PATH``."""
    path = shutil.which("ninja")
    if path is None:
        return Tool("ninja", None, "", "no ninja in PATH", "pip install ninja, and activate the environment")
    failed, said = _run(["ninja", "--version"])
    problem = f"{path} doesn't run: {said.strip()[-300:]}" if failed else ""
    return Tool("ninja", path, "" if failed else said.strip(), problem, "pip install ninja" if failed else "")


def cuda_compiler() -> Tool:
    """nvcc, which builds FusedAdam and other ops for NVIDIA GPUs."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = str(Path(home) / "bin" / "nvcc") if home and (Path(home) / "bin" / "nvcc").exists() else shutil.which("nvcc")
    if path is None:
        remedy = "install the CUDA toolkit of torch's CUDA version and set CUDA_HOME, or use torch.optim.AdamW"
        return Tool("nvcc", None, "", "no nvcc in CUDA_HOME or PATH", remedy)
    return Tool("nvcc", path, _run([path, "--version"])[1].strip().rpartition("\n")[2])


def links() -> dict[str, Any]:
    """What connects GPUs and machines.

    Returns:
        ``gpu_topology``: nvidia-smi's matrix, or None without it. ``infiniband``: each port's state and rate.
        ``interfaces``: network interfaces that are up, with their speed in Mbit/s (0: not told).
    """
    topology = None
    if shutil.which("nvidia-smi"):
        failed, said = _run(["nvidia-smi", "topo", "-m"])
        topology = None if failed else said.strip()
    interfaces = {}
    with suppress(psutil.Error, OSError):
        stats = psutil.net_if_stats()
        interfaces = {name: int(each.speed) for name, each in sorted(stats.items()) if each.isup and name != "lo"}
    return {"gpu_topology": topology, "infiniband": infiniband(), "interfaces": interfaces}


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """InfiniBand, RoCE and EFA ports, as the kernel lists them.

    Args:
        root: Where it lists them.
    """
    found = []
    with suppress(OSError):
        for port in sorted(root.glob("*/ports/*")):
            kind = _read(port / "link_layer") or "unknown"
            name = port.parent.parent.name
            driver = (port.parent.parent / "device" / "driver").resolve().name
            found.append(
                {
                    "device": name,
                    "port": port.name,
                    "kind": "EFA" if driver == "efa" or name.startswith("efa") else kind,
                    "state": _read(port / "state"),
                    "rate": _read(port / "rate"),
                }
            )
    return found


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _run(command: list[str]) -> tuple[bool, str]:
    """Whether a program failed, and what it said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROGRAM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, f"no answer within {_PROGRAM_SECONDS} s"
    except OSError as error:
        return True, str(error)
    return done.returncode != 0, done.stdout


def _first_line(command: list[str]) -> str:
    failed, said = _run(command)
    return "" if failed else said.strip().partition("\n")[0]
