# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` in real fits, scraped by a real Prometheus; and every query of the dashboard."""

import contextlib
import json
import multiprocessing
import re
import subprocess
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero3 import Zero3Monitor
from lightning_zero3.config import SetupError
from lightning_zero3.metrics import names, prometheus
from lightning_zero3.metrics.prometheus import PrometheusServer, Snapshot, series_of
from tests.fits import Language, Pairs, Regression, Sentences, fit
from tests.models import build_glm, tiny_glm
from tests.prometheus import BINARY, NO_BINARY, PROMTOOL, ask, free_port, scraping, wait_for

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client isn't installed")
NEEDS_PROMETHEUS = pytest.mark.skipif(BINARY is None or PROMTOOL is None, reason=NO_BINARY)
DASHBOARD = Path(__file__).parents[2] / "dashboards" / "grafana" / "zero3.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]
QUERIES = {f"{each['title']}: {q['legendFormat']}": q["expr"] for each in PANELS for q in each["targets"]}
OF_A_GPU = re.compile(r'peak_reserved|peak_allocated|between_steps|allocator_retries|of="gpu"')
GIB = 2**30


class UntilScraped(pl.Callback):
    """Holds each step until Prometheus has seen it, and reads what is served."""

    def __init__(self, url: str, port: int) -> None:
        self.url, self.port, self.last, self.page = url, port, 0.0, ""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            self.last = wait_for(self.url, 'zero3_optimizer_step{run="real"}', trainer.global_step)
            self.page = read(self.port)


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def scraped(url: str, port: int) -> dict[str, Any]:
    config = tiny_glm()
    monitor = Zero3Monitor(peak_flops=1e12, prometheus_port=port, run_name="real", summary=False)
    until = UntilScraped(url, port)
    fit(
        Language(build_glm(config, seed=1)),
        Sentences(config.vocab_size),
        "zero3_fast",
        steps=2,
        callbacks=[monitor, until],
    )
    return {
        "at": until.last,
        "page": until.page,
        "latest": dict(monitor.latest),
        "ranks": monitor._values.of_each_rank(),
    }


@NEEDS_PROMETHEUS
def test_prometheus_gets_a_real_fits_values_and_answers_the_dashboards_queries(ranks, tmp_path):
    port = free_port()
    with scraping(port, tmp_path) as url:
        run = ranks(2).run(scraped, url, port)[0]
        latest, at = run["latest"], run["at"]
        # What is served is what was logged, in base units, of all ranks.
        for name, scale in ((names.STEP_TOTAL, 1e-3), (names.HOST_RSS, GIB), (names.LOSS_OF_STEP, 1), (names.MFU, 1)):
            ((labels, value),) = ask(url, series_of(names.BY_NAME[name]).name, at).items()
            assert labels == (("run", "real"),)
            assert value == pytest.approx(latest[name] * scale, rel=1e-12)
        forward = ask(url, "zero3_rank_step_fwd_seconds", at)
        own = run["ranks"][names.FWD]
        assert forward == {
            (("node", "0"), ("rank", str(rank)), ("run", "real")): pytest.approx(own[rank] / 1e3) for rank in (0, 1)
        }
        assert max(own) == latest[names.FWD]
        assert min(own) == latest["ranks/fwd_min_ms"]
        load = ask(url, "zero3_moe_expert_load_max_over_mean", at)
        assert load[(("layer", "all"), ("run", "real"))] == latest[names.EXPERT_LOAD]
        assert len(load) == 1 + sum(name.startswith(f"{names.EXPERT_LOAD}/") for name in latest) > 1
        answers = {title: ask(url, query.replace("$run", "real"), at) for title, query in QUERIES.items()}
    empty = {title for title, answer in answers.items() if not answer}
    assert empty == {title for title, query in QUERIES.items() if OF_A_GPU.search(query)}
    assert len(answers) - len(empty) > 20
    check = subprocess.run([PROMTOOL, "check", "metrics"], input=run["page"], text=True, capture_output=True)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
    with pytest.raises(OSError, match="refused"):
        read(port)


def a_server(run: str = "made up", port: int = 0) -> PrometheusServer:
    return PrometheusServer(
        address="127.0.0.1", port=port, run=run, ranks_per_node=2, capacities={"gpu": 80 * GIB, "host": 512 * GIB}
    )


def a_snapshot() -> Snapshot:
    """Every metric that there is, as a run on GPUs has them."""
    values = {entry.name: 1.0 + at for at, entry in enumerate(names.METRICS)}
    values |= {names.of_layer(entry.name, "layer_1"): 2.0 for entry in names.METRICS if entry.per_layer}
    return Snapshot(7, values, {entry.name: [1.0, 2.0, 3.0, 4.0] for entry in names.METRICS if entry.spread})


@NEEDS_PROMETHEUS
def test_every_query_has_an_answer_where_every_metric_is_served(tmp_path):
    server = a_server()
    server.publish(a_snapshot())
    with scraping(server.port, tmp_path) as url:
        at = wait_for(url, "zero3_optimizer_step", 7)
        empty = [title for title, query in QUERIES.items() if not ask(url, query.replace("$run", "made up"), at)]
        assert not empty
        assert (
            ask(url, "zero3_rank_memory_peak_allocated_bytes", at)[(("node", "1"), ("rank", "3"), ("run", "made up"))]
            == 4 * GIB
        )
        check = subprocess.run([PROMTOOL, "check", "metrics"], input=read(server.port), text=True, capture_output=True)
    server.close()
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


def test_every_metric_has_a_legal_name_its_unit_and_the_tables_words():
    server = a_server()
    assert "zero3" not in read(server.port)  # before the first logged step
    server.publish(a_snapshot())
    families = {family.name: family for family in parser.text_string_to_metric_families(read(server.port))}
    server.close()
    for entry in names.METRICS:
        series = series_of(entry)
        if entry.name.startswith(names.SPREAD_PREFIX):
            assert series.name not in families  # the ranks' own values tell more
            continue
        assert re.fullmatch(r"[a-z_][a-z0-9_]*", series.name)
        assert families[series.name].documentation == entry.definition
        assert (series.unit == "seconds") is (entry.unit == "ms")
        assert (series.unit == "bytes") is (entry.unit == "GiB")
        assert (series_of(entry, of_each_rank=True).name in families) is entry.spread
    assert set(prometheus.EXTRA) <= families.keys()
    assert len({series_of(entry).name for entry in names.METRICS}) == len(names.METRICS)


def test_the_dashboard_is_what_its_builder_writes():
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk isn't installed")
    from dashboards import build

    assert DASHBOARD.read_text() == build.text(), "run `python dashboards/build.py`"


@pytest.mark.parametrize("port", [-1, 65536, True, "9400"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(SetupError, match="prometheus_port="):
        Zero3Monitor(prometheus_port=port)
    with pytest.raises(SetupError, match="prometheus_address="):
        Zero3Monitor(prometheus_port=0, prometheus_address="")


class Fails(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ArithmeticError("as the test wants it")
        return super().training_step(batch, batch_idx)


class Reads(pl.Callback):
    def __init__(self, port: int) -> None:
        self.port, self.runs = port, []

    def on_train_batch_end(self, *_: Any) -> None:
        self.runs += re.findall(r'zero3_optimizer_step\{run="(\w+)"\} (\S+)', read(self.port))


def one_after_another(port: int) -> tuple[list[Any], list[str]]:
    """A fit that fails, then two that don't, on the same port."""
    reads = Reads(port)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run, module in (("failed", Fails()), ("second", Regression()), ("third", Regression())):
            monitor = Zero3Monitor(prometheus_port=port, run_name=run, summary=False)
            with pytest.raises(ArithmeticError) if run == "failed" else contextlib.nullcontext():
                fit(module, Pairs(), "zero3_fast", steps=3 if run == "failed" else 2, callbacks=[monitor, reads])
    return reads.runs, [str(each.message) for each in caught if "No /metrics" in str(each.message)]


def test_the_port_is_free_after_a_failed_fit_and_between_two_fits(ranks):
    runs, warned = ranks(1).run(one_after_another, free_port())[0]
    assert runs == [(run, f"{step}.0") for run in ("failed", "second", "third") for step in (1, 2)]
    assert warned == []


def test_the_port_is_free_while_a_forked_data_worker_holds_its_socket():
    server = a_server()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        server.close()
        again = a_server(port=server.port)
        again.publish(a_snapshot())
        assert "zero3_optimizer_step" in read(again.port)
        again.close()
    finally:
        worker.terminate()
        worker.join()


def in_use(port: int) -> tuple[list[str], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Regression(), Pairs(), "zero3_fast", steps=2, callbacks=[Zero3Monitor(prometheus_port=port)])
    return [str(each.message) for each in caught if "No /metrics" in str(each.message)], trainer.global_step


def test_a_port_in_use_is_a_warning(ranks):
    other = a_server()
    ((warning,), steps) = ranks(1).run(in_use, other.port)[0]
    other.close()
    assert f"127.0.0.1 port {other.port}" in warning
    assert steps == 2
