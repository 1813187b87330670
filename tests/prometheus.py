# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus for tests: started on free ports, asked by its HTTP API."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
NO_BINARY = "no prometheus on this machine (Debian: apt-get install prometheus)"
DEADLINE_SECONDS = 60
_CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs: [{{job_name: fit, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes a port of this machine; its own address."""
    (folder / "prometheus.yml").write_text(_CONFIG.format(port=port))
    own = free_port()
    assert BINARY is not None
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{own}"
        finally:
            process.terminate()
            process.wait()


def ask(url: str, query: str, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
    """The answer to an instant query: labels, less Prometheus' own, → value.

    Raises:
        urllib.error.HTTPError: The query is wrong.
    """
    parameters = {"query": query} if at is None else {"query": query, "time": f"{at:.3f}"}
    result = _get(f"{url}/api/v1/query?{urllib.parse.urlencode(parameters)}")["data"]["result"]
    return {
        tuple(sorted((k, v) for k, v in each["metric"].items() if k not in ("__name__", "instance", "job"))): float(
            each["value"][1]
        )
        for each in result
    }


def wait_for(url: str, query: str, value: float) -> float:
    """Wait until a query answers with one series of that value; when that was."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    seen: Any = None
    while time.monotonic() < deadline:
        now = time.time()
        try:
            seen = list(ask(url, query, now).values())
        except OSError as error:  # it still starts: nobody listens, or it isn't ready
            if isinstance(error, urllib.error.HTTPError) and error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            seen = error
        if seen == [value]:
            return now
        time.sleep(0.05)
    raise AssertionError(f"{query} never was {value}, but {seen}")


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)
