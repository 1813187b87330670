# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` for Prometheus: the last logged step, served by rank 0 of a fit.

A scrape reads the last snapshot, whole; the training thread only puts a new one in its place.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names
from lightning_zero3.metrics.memory import GIB

LOOPBACK = "127.0.0.1"
PREFIX = "zero3_"
# Prometheus counts in base units: how a name ends in our table → how it ends there, and by what the value grows.
_BASE_UNITS = {
    "_us_per_visit": ("_seconds_per_visit", 1e-6),
    "_ms": ("_seconds", 1e-3),
    "_gib": ("_bytes", float(GIB)),
}
# What only Prometheus gets: constants, and the step, which other loggers have as their axis.
STEP = f"{PREFIX}optimizer_step"
RANKS = f"{PREFIX}ranks"
CAPACITY = f"{PREFIX}memory_capacity_bytes"
EXTRA = {
    STEP: "Optimizer steps taken when the values were logged.",
    RANKS: "Number of ranks.",
    CAPACITY: "Memory that there is: of rank 0's GPU (of=gpu), of its node (of=host).",
}


@dataclass(frozen=True)
class Series:
    """A metric as Prometheus sees it.

    Args:
        name: Legal there, with its base unit.
        unit: ``"seconds"`` or ``"bytes"``, with which the name then ends, or nothing.
        scale: What our values are multiplied by.
        help: What it is.
    """

    name: str
    unit: str
    scale: float
    help: str


def series_of(entry: names.MetricEntry, *, of_each_rank: bool = False) -> Series:
    """A metric's name, unit and help for Prometheus.

    Args:
        entry: From the table.
        of_each_rank: For the ranks' own values, which must not be added to the combined one.

    >>> series_of(names.BY_NAME[names.STEP_TOTAL]).name
    'zero3_step_total_seconds'
    >>> series_of(names.BY_NAME[names.HOST_RSS], of_each_rank=True).name
    'zero3_rank_memory_host_rss_bytes'
    """
    stem, scale, unit = entry.name.replace("/", "_"), 1.0, ""
    for ours, (theirs, factor) in _BASE_UNITS.items():
        if stem.endswith(ours):
            stem, scale = stem.removesuffix(ours) + theirs, factor
            unit = theirs[1:] if theirs in ("_seconds", "_bytes") else ""
            break
    # The combined value's definition says which of the ranks' it is.
    what = f"Of one rank: {entry.label}. {entry.definition}" if of_each_rank else entry.definition
    return Series(f"{PREFIX}{'rank_' if of_each_rank else ''}{stem}", unit, scale, what)


@dataclass(frozen=True)
class Snapshot:
    """What one scrape sees.

    Args:
        step: Optimizer steps taken.
        values: Metric name → value over all ranks, as loggers get it.
        of_each_rank: Metric name → each rank's value, of those whose spread is told.
    """

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    of_each_rank: Mapping[str, Sequence[float]] = field(default_factory=dict)


class PrometheusServer:
    """An HTTP server in a thread of its own, until :meth:`close`.

    Args:
        address: Where to listen.
        port: The port; 0 takes a free one.
        run: Value of the label ``run`` of every series.
        ranks_per_node: Tells a rank's node, counted from 0.
        capacities: ``"gpu"`` and ``"host"`` → bytes that there are.

    Raises:
        OSError: The port is in use, or the address isn't this machine's.
    """

    def __init__(
        self, *, address: str, port: int, run: str, ranks_per_node: int, capacities: Mapping[str, int]
    ) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._ranks_per_node, self._capacities = run, ranks_per_node, dict(capacities)
        self._snapshot: Snapshot | None = None
        # A registry of its own: a process may fit twice, and the global one has metrics of others.
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        self.port: int = self._server.server_port

    def publish(self, snapshot: Snapshot) -> None:
        """Show a step from now on.

        Args:
            snapshot: It; not to be changed afterwards.
        """
        self._snapshot = snapshot

    def close(self) -> None:
        """Stop serving and free the port, also where data workers that were forked meanwhile hold its socket."""
        self._server.shutdown()
        self._thread.join()
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client in each scrape."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        ranks = max((len(values) for values in snapshot.of_each_rank.values()), default=1)
        capacities = [({"of": of}, float(size)) for of, size in self._capacities.items()]
        for name, samples in ((STEP, [({}, snapshot.step)]), (CAPACITY, capacities), (RANKS, [({}, ranks)])):
            yield self._family(Series(name, "", 1.0, EXTRA[name]), samples)
        for entry in names.METRICS:
            # Each rank's own value tells more than the smallest and the place of the largest.
            if entry.name.startswith(names.SPREAD_PREFIX):
                continue
            yield from self._combined(entry, snapshot.values)
            yield from self._of_each_rank(entry, snapshot.of_each_rank.get(entry.name, ()))

    def _combined(self, entry: names.MetricEntry, values: Mapping[str, float]) -> Iterator[Any]:
        samples = []
        if entry.per_layer:
            layers = [name for name in values if name.startswith(f"{entry.name}/")]
            samples = [({"layer": name.removeprefix(f"{entry.name}/")}, values[name]) for name in layers]
        if entry.name in values:
            samples.insert(0, ({"layer": "all"} if entry.per_layer else {}, values[entry.name]))
        if samples:
            yield self._family(series_of(entry), samples)

    def _of_each_rank(self, entry: names.MetricEntry, values: Sequence[float]) -> Iterator[Any]:
        samples = [
            ({"rank": str(rank), "node": str(rank // self._ranks_per_node)}, value) for rank, value in enumerate(values)
        ]
        if samples:
            yield self._family(series_of(entry, of_each_rank=True), samples)

    def _family(self, series: Series, samples: Sequence[tuple[Mapping[str, str], float]]) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        labels = list(samples[0][0]) if samples else []
        family = GaugeMetricFamily(series.name, series.help, labels=["run", *labels], unit=series.unit)
        for values, value in samples:
            family.add_metric([self._run, *values.values()], value * series.scale)
        return family


def check_options(address: str | None, port: int | None) -> None:
    """Refuse what can't be served.

    Args:
        address: Where to listen.
        port: None for no server.

    Raises:
        SetupError: No such port, an empty address, or prometheus-client isn't installed.
    """
    if port is None:
        return
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise SetupError(
            f"prometheus_port={port!r}: a port from 1 to 65535, 0 for any that is free, or None for no server."
        )
    if not address:
        raise SetupError(
            f"prometheus_address={address!r}: an address of this machine, such as {LOOPBACK!r} (this machine alone) or "
            "'0.0.0.0' (all that reach it)."
        )
    if importlib.util.find_spec("prometheus_client") is None:
        raise SetupError(
            f"prometheus_port={port}: prometheus-client isn't installed. pip install 'lightning_zero3[dashboards]', or "
            "leave prometheus_port out."
        )


def serve(
    address: str, port: int, *, run: str, ranks_per_node: int, capacities: Mapping[str, int]
) -> PrometheusServer | None:
    """Start a server; a warning and None where the port can't be had, since training matters more.

    Args:
        address: Where to listen.
        port: The port.
        run: See :class:`PrometheusServer`.
        ranks_per_node: Likewise.
        capacities: Likewise.
    """
    try:
        server = PrometheusServer(
            address=address, port=port, run=run, ranks_per_node=ranks_per_node, capacities=capacities
        )
    except OSError as error:
        rank_zero_warn(
            f"No /metrics for Prometheus in this fit: {address} port {port} can't be listened on ({error}). Give "
            "Zero3Monitor another prometheus_port (0 takes a free one) or prometheus_address."
        )
        return None
    rank_zero_info(f"Metrics for Prometheus: http://{address}:{server.port}/metrics")
    return server
