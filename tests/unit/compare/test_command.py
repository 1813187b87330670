# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 compare`` as a user runs it: what it prints and draws, and what it says to input that can't be."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from lightning_zero3 import cli
from lightning_zero3.compare import charts
from lightning_zero3.metrics.names import STEP_MICROSTEP
from tests.runs import learning, reported, write_csv


@pytest.fixture
def qwen(tmp_path: Path) -> list[str]:
    return [reported(tmp_path / side, "qwen", side) for side in "ab"]


def test_json_has_the_schema(qwen, capsys):
    # A flag before the runs doesn't take one of them for its value.
    assert cli.main(["compare", "--json", *qwen]) == 0
    found = json.loads(capsys.readouterr().out)
    fields = {f"{what}_{side}" for what in ("mean", "min", "max", "n") for side in "ab"}
    assert set(found["metrics"][STEP_MICROSTEP]) == fields | {"saved", "ranges_overlap", "t", "df"}
    assert set(found["loss"]) == {"step1_identical", "largest_difference"}
    assert cli.main(["compare", *qwen, "--warmup", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"][STEP_MICROSTEP]["n_a"] == 6


def test_a_table_in_a_terminal_of_80_characters(qwen, capsys):
    assert cli.main(["compare", *qwen]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for expected in ("188.88", "187.58–190.87", "186.15", "184.55–189.92", "overlap", "4.2 (13.9)", "0.066 %"):
        assert expected in out, expected
    assert "train/" not in out
    assert cli.main(["compare", *qwen, "--metrics", "train/*"]) == 0
    out = capsys.readouterr().out
    assert "train/" in out
    assert "187.58–190.87" not in out


def test_a_page_of_markdown(qwen, capsys):
    assert cli.main(["compare", *qwen, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sides = "188.88 (187.58–190.87) | 186.15 (184.55–189.92)"
    assert f"| step/step_microstep_ms | {sides} | 2.73, 0.066 % | overlap, 4.2 (13.9) |" in lines
    rows = [line for line in lines if line.startswith("|")]
    assert {row.count("|") for row in rows} == {6}


def test_several_runs_of_each_side(tmp_path, capsys):
    runs = [write_csv(tmp_path / str(n), learning(6, noise=n * 1e-4)) for n in range(4)]
    assert cli.main(["compare", "--a", *runs[:2], "--b", *runs[2:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["path"] for run in found["runs"]["a"]] == runs[:2]
    assert found["noise_floor"]["loss"]["largest_difference"] > 0
    assert cli.main(["compare", runs[0], runs[2], "--a", runs[1], "--b=" + runs[3], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == found["runs"]


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_a_chart(tmp_path, monkeypatch, noise):
    drawn = []

    def kept(figure, path):
        drawn.append(figure)
        figure.savefig(path)

    monkeypatch.setattr(charts, "save", kept)
    runs = [write_csv(tmp_path / f"${n}", learning(60, noise=n * noise)) for n in range(3)]
    target = tmp_path / "chart.png"
    assert cli.main(["compare", "--a", *runs[:2], "--b", runs[2], "--chart", str(target), "--json"]) == 0
    assert imread(target).shape[:2] > (300, 500)
    steps, phases, losses = drawn[0].axes
    # Three runs and two means; the first step is left out.
    assert len(steps.lines) == 5
    assert list(steps.lines[0].get_xdata()) == list(range(2, 61))
    assert [text.get_text() for text in phases.get_yticklabels()] == ["whole step", "optimizer"]
    said = [text.get_text() for text in losses.texts]
    assert said == ([] if noise else ["bit-identical at all 60 common steps"])
    if noise:
        noisy, apart = losses.lines
        assert (len(noisy.get_xdata()), len(apart.get_xdata())) == (59, 59)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "compare RUN_A RUN_B"),
        ("{a}", "compare RUN_A RUN_B"),
        ("--a {a}", "compare RUN_A RUN_B"),
        ("{a} {b} {b}", "unrecognized arguments"),
        ("{a} no/such/run", "no/such/run: there is no such file or folder"),
        ("{a} {one}", "B has no step left: {one} logged 1 step, and the first 1 of each run is left out"),
        ("{a} {b} --warmup 10", "A has no step left: {a} logged 10 steps, and the first 10 of each run are"),
        ("{a} {b} --warmup 0", "--warmup 0: 1 or more"),
        ("{a} {b} --warmup x", "--warmup 'x': int is expected"),
        ("{a} {other}", "No metric is in both: A has optim/grad_clear_visits,"),
        ("{a} {b} --json --markdown", "one of them"),
        ("{a} {b} --metrics nothing/*", "--metrics nothing/*: no such metric"),
        ("{a} {b} --loss yours", "--loss yours: not in both"),
        ("{a} {b} --chart x.jpg", "ends in .png"),
        ("{a} {b} --chart no/such/folder/x.png", "can't be written"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, message, qwen, tmp_path, capsys):
    places = {
        "a": qwen[0],
        "b": qwen[1],
        "one": write_csv(tmp_path / "one", {STEP_MICROSTEP: {0: 3.0}}),
        "other": write_csv(tmp_path / "other", {"mine": {0: 3.0, 1: 2.0}}),
    }
    assert cli.main(["compare", *(each.format(**places) for each in arguments.split())]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert message.format(**places) in err
