# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces joined by a virtual cable, else two loopback addresses.

In a namespace a process has a network of its own: another one's ``localhost`` can't be reached, and interfaces have to
be named, as between real hosts. Processes, files and clocks are this machine's.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_NUMBERS = itertools.count()


@dataclass
class Host:
    """One of two hosts.

    Args:
        address: At which the other reaches it.
        interface: Its network interface.
        namespace: Its network namespace; None for loopback.
    """

    address: str
    interface: str
    namespace: str | None
    _running: list[tuple[subprocess.Popen[str], Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        """Start a process here."""
        inside = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by finish and by close
        process = subprocess.Popen(
            [*inside, *command],
            env={**environment, "GLOO_SOCKET_IFNAME": self.interface},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._running.append((process, output))

    @property
    def ended(self) -> bool:
        """Whether one of the processes here has ended."""
        return any(process.poll() is not None for process, _ in self._running)

    def finish(self, timeout: float) -> list[tuple[int, str]]:
        """Exit statuses and outputs, in the order of the starts; subprocess.TimeoutExpired if one goes on."""
        seen = []
        for process, output in self._running:
            process.wait(timeout)
            output.seek(0)
            seen.append((process.returncode, output.read()))
            output.close()
        self._running = []
        return seen

    def signal(self, number: int) -> None:
        """To the processes that were started here, as SLURM does."""
        for process, _ in self._running:
            process.send_signal(number)

    def kill(self) -> None:
        """Kill every process here, children too, as if the power were gone."""
        for process, _ in self._running:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for one in (parent, *parent.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()

    def unplug(self) -> None:
        """Take the network away, for good."""
        assert self.namespace is not None
        assert _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def close(self) -> None:
        """End what still runs."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self.finish(timeout=20)


def _ip(*arguments: str) -> bool:
    with suppress(FileNotFoundError):
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
    return False


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts; whatever runs on them at the end is ended, and their networks are removed."""
    number = next(_NUMBERS)
    # Interface names have at most 15 characters; other test runs on this machine have other process numbers.
    names = [f"lz{os.getpid()}n{number}{which}" for which in "ab"]
    cable = [f"v{os.getpid() % 1_000_000}x{number}{which}" for which in "ab"]
    addresses = [f"10.213.{number % 250}.{host}" for host in (1, 2)]
    steps: list[Callable[[], bool]] = [lambda name=name: _ip("netns", "add", name) for name in names]
    steps.append(
        lambda: _ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", cable[1], "netns", names[1])
    )
    for name, end, address in zip(names, cable, addresses, strict=True):
        steps += [
            lambda name=name, end=end, address=address: _ip("-n", name, "addr", "add", f"{address}/24", "dev", end),
            lambda name=name, end=end: _ip("-n", name, "link", "set", end, "up"),
            lambda name=name: _ip("-n", name, "link", "set", "lo", "up"),
        ]
    try:
        if all(step() for step in steps):
            hosts = [Host(*what) for what in zip(addresses, cable, names, strict=True)]
        else:
            hosts = [Host(address, "lo", None) for address in ("127.0.0.1", "127.0.0.2")]
        try:
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                host.close()
    finally:
        for name in names:
            _ip("netns", "del", name)
