# SPDX-License-Identifier: Apache-2.0
"""Metrics of MLflow's runs, from a store of files or of SQLite, without MLflow and without a change to the store.

MLflow's own client alters an older store's tables when it opens them, and writes where a reader may not.
"""

from __future__ import annotations

import math
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from lightning_zero3.config import SetupError

_SCHEME = "sqlite:///"
_SQLITE = b"SQLite format 3\0"
_META = "meta.yaml"
_NAME = "mlflow.runName"

Values = dict[str, dict[int, float]]


def is_store(given: str) -> bool:
    """Whether a path is one of MLflow's: a run's folder, a folder of experiments, an SQLite file; ``#RUN`` chooses.

    Args:
        given: As on the command line.
    """
    store, chosen = _parts(given)
    if given.startswith(_SCHEME) or _is_sqlite(store):
        return True
    return store.is_dir() and ((store / _META).is_file() or any(store.glob(f"*/*/{_META}")) or bool(chosen))


def read(given: str) -> tuple[Values, tuple[int, ...]]:
    """A run's metrics, and the steps that were logged twice; the later value counts.

    Args:
        given: See :func:`is_store`. RUN is a run's id, the beginning of one, or its name; a store with a single run
            needs none.

    Raises:
        SetupError: There is no such run, or several.
    """
    store, chosen = _parts(given)
    if store.is_dir():
        return _merged(_in_files(given, store, chosen))
    try:
        return _merged(_in_sqlite(given, store, chosen))
    except sqlite3.Error as error:
        raise SetupError(f"{given} can't be read as a store of MLflow's: {error}.") from error


def _parts(given: str) -> tuple[Path, str]:
    """Store and run.

    >>> _parts("sqlite:///runs/mlflow.db#4a1f")
    (PosixPath('runs/mlflow.db'), '4a1f')
    """
    plain = given.removeprefix(_SCHEME)
    if "#" not in plain or Path(plain).exists():
        return Path(plain), ""
    store, _, chosen = plain.rpartition("#")
    return Path(store), chosen


def _is_sqlite(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _in_files(given: str, store: Path, chosen: str) -> list[tuple[str, int, float, int]]:
    """Rows of a store of files: name, step, value, time."""
    if (store / _META).is_file() and (store / "metrics").is_dir():
        run = store
    else:
        runs = {meta.parent.name: meta.parent for meta in store.glob(f"*/*/{_META}")}
        names = {id_: _text(folder / "tags" / _NAME) for id_, folder in runs.items()}
        run = runs[_one(given, chosen, names)]
    rows = []
    for file in sorted(path for path in (run / "metrics").rglob("*") if path.is_file()):
        for line in _text(file).splitlines():
            time, value, step = line.split()[:3]
            rows.append((file.relative_to(run / "metrics").as_posix(), int(step), float(value), int(time)))
    return rows


def _in_sqlite(given: str, store: Path, chosen: str) -> list[tuple[str, int, float, int]]:
    if not store.is_file():
        raise SetupError(f"{given}: there is no file {store}.")
    with closing(sqlite3.connect(f"file:{store.absolute().as_posix()}?mode=ro", uri=True)) as database:
        names = dict(database.execute("SELECT run_uuid, name FROM runs WHERE lifecycle_stage != 'deleted'"))
        run = _one(given, chosen, names)
        rows = database.execute("SELECT key, step, value, timestamp, is_nan FROM metrics WHERE run_uuid = ?", (run,))
        # A database holds no NaN and no infinity.
        return [(name, step, math.nan if nan else _unbounded(value), time) for name, step, value, time, nan in rows]


def _unbounded(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value


def _one(given: str, chosen: str, names: Mapping[str, str | None]) -> str:
    """The id of the run that is meant."""
    found = [id_ for id_, name in names.items() if id_.startswith(chosen) or name == chosen]
    if chosen in names:
        found = [chosen]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{id_} ({name})" if name else id_ for id_, name in sorted(names.items())[:10]) or "none"
    what = f"{len(found)} runs" if found else "no run"
    store = given.partition("#")[0]
    raise SetupError(f"{given}: {what} of that name. Give one as {store}#RUN. Runs in there: {known}.")


def _merged(rows: Iterable[tuple[str, int, float, int]]) -> tuple[Values, tuple[int, ...]]:
    values: Values = {}
    repeated = set()
    for name, step, value, _ in sorted(rows, key=lambda row: (row[0], row[1], row[3])):
        if step in values.setdefault(name, {}):
            repeated.add(step)
        values[name][step] = value
    values.pop("epoch", None)
    return values, tuple(sorted(repeated))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
