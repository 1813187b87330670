# SPDX-License-Identifier: Apache-2.0
"""What ``Zero3Monitor`` gives to each logger's own library, read back by that library from disk."""

import csv
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_zero3 import Zero3Monitor
from lightning_zero3.metrics.tensorboard_layout import LAYOUT
from tests.fits import Language, Sentences, fit
from tests.models import build_glm, tiny_glm

STEPS = 2
GPU_CHARTS = {"GPU (GiB)"}


def trained(make: Callable[..., Any], arguments: dict[str, Any]) -> tuple[dict[str, float], Any]:
    """A fit on two ranks with one logger: rank 0's last values, and how to find the run."""
    logger = make(**arguments)
    config = tiny_glm()
    monitor = Zero3Monitor(peak_flops=1e12, summary=False)
    fit(
        Language(build_glm(config, seed=1)),
        Sentences(config.vocab_size),
        "zero3_fast",
        steps=STEPS,
        logger=logger,
        callbacks=[monitor],
    )
    return dict(monitor.latest), logger.version


def in_csv(folder: str) -> Any:
    return trained(CSVLogger, {"save_dir": folder, "name": "", "version": "run"})


def in_tensorboard(folder: str) -> Any:
    return trained(TensorBoardLogger, {"save_dir": folder, "name": "", "version": "run"})


def in_mlflow(uri: str) -> Any:
    return trained(MLFlowLogger, {"experiment_name": "fits", "tracking_uri": uri})


def in_wandb(folder: str) -> Any:
    import wandb

    values = trained(WandbLogger, {"save_dir": folder, "offline": True, "project": "fits"})
    wandb.finish()  # what is buffered is written; a process that ends does so by itself
    return values


def test_csv(ranks, tmp_path):
    latest, _ = ranks(2).run(in_csv, str(tmp_path))[0]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1"]
    assert {name: float(rows[-1][name]) for name in latest} == latest


def test_tensorboard_and_its_custom_scalars(ranks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    latest, _ = ranks(2).run(in_tensorboard, str(tmp_path))[0]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert latest.keys() <= set(scalars)
    for name, value in latest.items():
        assert [each.step for each in events.Scalars(name)] == list(range(STEPS)), name
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6), name
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(LAYOUT)
    for chart in (chart for category in layout.category for chart in category.chart):
        # As TensorBoard's page does: regular expressions, matched from the beginning.
        for tag in chart.multiline.tag:
            found = [name for name in scalars if re.match(tag, name)]
            assert bool(found) is (chart.title not in GPU_CHARTS), (chart.title, tag)


def test_mlflow(ranks, tmp_path):
    # Its SQLite store: MLflow 3.17 refuses to write to files.
    mlflow = pytest.importorskip("mlflow", reason="mlflow isn't installed")
    pytest.importorskip("sqlalchemy", reason="mlflow's SQL store needs sqlalchemy; mlflow-skinny comes without")
    pytest.importorskip("alembic", reason="mlflow's SQL store needs alembic; mlflow-skinny comes without")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    # MLFlowLogger opens the store on every rank, and two that make its tables at once fail: so they are made before.
    client = mlflow.MlflowClient(uri)
    client.search_experiments()
    latest, run_id = ranks(2).run(in_mlflow, uri)[0]
    assert client.get_run(run_id).info.status == "FINISHED"
    for name, value in latest.items():
        history = client.get_metric_history(run_id, name)
        assert [each.step for each in history] == list(range(STEPS)), name
        assert history[-1].value == pytest.approx(value, rel=1e-12, nan_ok=math.isnan(value)), name


def records_of(path: Path) -> Iterator[bytes]:
    """The records of W&B's offline file: LevelDB's log format behind a header of its own.

    wandb itself reads it in Go only.
    """
    block, data, record = 32768, path.read_bytes(), b""
    assert data[:4] == b":W&B"
    at = 7
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:  # a header never crosses a block's end
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a record's last piece
            yield record
            record = b""


def test_wandb_offline(ranks, tmp_path):
    pytest.importorskip("wandb", reason="wandb isn't installed")
    from wandb.proto import wandb_internal_pb2

    latest, run_id = ranks(2).run(in_wandb, str(tmp_path))[0]
    (path,) = tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    rows = []
    for data in records_of(path):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): float(item.value_json) for item in items})
    assert [row["trainer/global_step"] for row in rows] == list(range(STEPS))
    assert {name: rows[-1][name] for name in latest} == pytest.approx(latest)
