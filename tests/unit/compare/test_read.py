# SPDX-License-Identifier: Apache-2.0
"""Runs as CSV, TensorBoard's event files and MLflow's stores: the same numbers from each, and what can't be read."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_zero3.compare.read import read_run
from lightning_zero3.config import SetupError
from lightning_zero3.metrics.names import LOSS, STEP_TOTAL
from tests.runs import learning, write_csv

# Exact in 32 bits.
VALUES = {LOSS: {0: 3.5, 1: 2.25, 2: 1.125}, STEP_TOTAL: {0: 900.0, 1: 300.0, 2: 301.5}}


def logged(logger) -> None:
    for step in range(3):
        logger.log_metrics({**{name: values[step] for name, values in VALUES.items()}, "epoch": 0}, step)
    logger.save()
    logger.finalize("success")


def test_a_csv_is_its_folder_or_its_file(tmp_path):
    logged(CSVLogger(tmp_path, name="", version="run"))
    for path in (tmp_path / "run", tmp_path / "run" / "metrics.csv"):
        run = read_run(str(path))
        assert (run.metrics, run.kind, run.repeated) == (VALUES, "CSV", ())
    assert run.numbered()[LOSS] == {1: 3.5, 2: 2.25, 3: 1.125}


def test_event_files_in_a_folder_alone_and_as_the_recipes_write_them(tmp_path):
    pytest.importorskip("tensorboard")
    logged(TensorBoardLogger(tmp_path, name="", version="run", sub_dir="tensorboard"))
    folder = tmp_path / "run" / "tensorboard"
    for path in (tmp_path / "run", folder, *folder.glob("events.*")):
        assert (read_run(str(path)).metrics, read_run(str(path)).kind) == (VALUES, "TensorBoard")
    # Beside a CSV they aren't looked at: it has all 64 bits.
    write_csv(tmp_path / "run", {LOSS: {0: 1 / 3}})
    assert read_run(str(tmp_path / "run")).metrics == {LOSS: {0: 1 / 3}}


def test_a_resume_into_the_same_log(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss\n0,4\n1,3\n2,2.5\n1,3.5\n2,2.75\n3,2\n")
    run = read_run(str(tmp_path))
    assert (run.metrics[LOSS], run.repeated) == ({0: 4, 1: 3.5, 2: 2.75, 3: 2}, (1,))


def mlflow_files(store: Path, run: str, name: str) -> Path:
    """A run as MLflow's store of files has it."""
    folder = store / "0" / run
    for metric, values in VALUES.items():
        path = folder / "metrics" / metric
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{1700 + step} {value} {step}\n" for step, value in values.items()))
    (folder / "tags").mkdir()
    (folder / "tags" / "mlflow.runName").write_text(name)
    (folder / "meta.yaml").write_text(f"run_id: {run}\n")
    return folder


def mlflow_database(path: Path) -> None:
    """Two runs in the columns that are read of MLflow's tables."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, lifecycle_stage TEXT)")
        database.execute(
            "CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan BOOL)"
        )
        database.executemany("INSERT INTO runs VALUES (?, ?, 'active')", [("4a1f", "one"), ("4a2e", "two")])
        rows = [(name, value, step, "4a1f", step, 0) for name, of in VALUES.items() for step, value in of.items()]
        rows += [(LOSS, 0.0, 9, "4a2e", 0, 1), (LOSS, 1.7976931348623157e308, 9, "4a2e", 1, 0)]
        # A resume: the later value counts, wherever its row is.
        rows += [(LOSS, 5.0, 12, "4a2e", 2, 0), (LOSS, 7.0, 11, "4a2e", 2, 0)]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)


def test_mlflows_store_of_files(tmp_path):
    folder = mlflow_files(tmp_path / "mlruns", "4a1f", "one")
    for given in (str(folder), str(tmp_path / "mlruns"), f"{tmp_path}/mlruns#4a", f"{tmp_path}/mlruns#one"):
        assert (read_run(given).metrics, read_run(given).kind) == (VALUES, "MLflow")


def test_mlflows_database(tmp_path):
    mlflow_database(tmp_path / "mlflow.db")
    before = (tmp_path / "mlflow.db").read_bytes()
    for given in (f"{tmp_path}/mlflow.db#4a1f", f"sqlite:///{tmp_path}/mlflow.db#one"):
        assert read_run(given).metrics == VALUES
    two = read_run(f"{tmp_path}/mlflow.db#two")
    assert math.isnan(two.metrics[LOSS][0])
    assert (two.metrics[LOSS][1], two.metrics[LOSS][2], two.repeated) == (math.inf, 5.0, (2,))
    assert (tmp_path / "mlflow.db").read_bytes() == before
    for wrong, said in (("", "2 runs"), ("#4a", "2 runs"), ("#three", "no run")):
        with pytest.raises(SetupError, match=rf"{said}.*4a1f \(one\), 4a2e \(two\)"):
            read_run(f"{tmp_path}/mlflow.db{wrong}")


@pytest.mark.slow
def test_what_mlflow_itself_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "")  # which it sets by itself; taken back at the end
    mlflow = pytest.importorskip("mlflow", reason="mlflow isn't installed")
    pytest.importorskip("sqlalchemy", reason="mlflow's SQL store needs sqlalchemy")
    pytest.importorskip("alembic", reason="mlflow's SQL store needs alembic")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("fits"), run_name="one").info.run_id
    for name, values in {**VALUES, "a/nan": {0: math.nan}, "a/inf": {0: -math.inf}}.items():
        for step, value in values.items():
            client.log_metric(run, name, value, timestamp=1000 + step, step=step)
    found = read_run(f"{tmp_path}/mlflow.db#one").metrics
    assert {name: found[name] for name in VALUES} == VALUES
    assert math.isnan(found["a/nan"][0])
    assert found["a/inf"][0] == -math.inf


HOSTILE = {
    "nothing": lambda path: None,
    "an empty folder": lambda path: path.mkdir(),
    "an empty file": lambda path: (path.mkdir(), (path / "metrics.csv").touch()),
    "a header alone": lambda path: (path.mkdir(), (path / "metrics.csv").write_text("step,train/loss\n")),
    "no step column": lambda path: (path.mkdir(), (path / "metrics.csv").write_text("a,b\n1,2\n3,4\n")),
    "words": lambda path: (path.mkdir(), (path / "metrics.csv").write_text("step,a\n1,x\n2,3\n4,5\n")),
    "NUL bytes": lambda path: (path.mkdir(), (path / "metrics.csv").write_bytes(b"step,a\n1,\0\n2,3\n4,5\n")),
    "an empty event file": lambda path: (path.mkdir(), (path / "events.out.tfevents.1.host").touch()),
    "a broken event file": lambda path: (path.mkdir(), (path / "events.out.tfevents.1.host").write_bytes(b"x" * 99)),
    "a database of something else": lambda path: sqlite3.connect(path).execute("CREATE TABLE a (b)").connection.close(),
    "a picture": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe"),
    "MLflow's without metrics": lambda path: (
        (path / "metrics").mkdir(parents=True),
        (path / "meta.yaml").touch(),
    ),
    "MLflow's with words": lambda path: (
        (path / "metrics").mkdir(parents=True),
        (path / "meta.yaml").touch(),
        (path / "metrics" / "a").write_text("1 x 2\n"),
    ),
    "MLflow's, cut": lambda path: (
        (path / "metrics").mkdir(parents=True),
        (path / "meta.yaml").touch(),
        (path / "metrics" / "a").write_text("1 2\n"),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_cannot_be_read_is_one_error_that_names_it(what, tmp_path):
    path = tmp_path / "run"
    HOSTILE[what](path)
    with pytest.raises(SetupError, match=f"{path}"):
        read_run(str(path))


def test_a_folder_of_runs_names_them(tmp_path):
    for number in range(2):
        write_csv(tmp_path / f"version_{number}", learning(3))
    with pytest.raises(SetupError, match=r"isn't a run, but holds some.*version_0, .*version_1\."):
        read_run(str(tmp_path))


def test_a_line_that_a_killed_run_cut_is_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss\n0,4\n1,3\n2,2.")
    assert read_run(str(tmp_path)).metrics == {LOSS: {0: 4, 1: 3}}
