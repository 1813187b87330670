# SPDX-License-Identifier: Apache-2.0
"""Sweeps, the longest sequence and many ranks: of tiny models, and by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_zero3 import cli
from lightning_zero3.gpus import GPUS
from lightning_zero3.plan import longest
from lightning_zero3.plan.longest import longest_within
from lightning_zero3.plan.scale import scaled
from lightning_zero3.plan.settings import Setup
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.plan.sweep import swept
from tests.models import tiny

SMALL = replace(GPUS["H200"], name="small", memory_gib=0.0)


@pytest.mark.slow
def test_a_sweep_of_a_tiny_model(tmp_path, capfd):
    tiny("glm").save_pretrained(tmp_path)
    sizes = ["--devices", "3", "--sequence-length", "48", "--precision", "bf16-mixed", "--bf16-masters"]
    chart = tmp_path / "sweep.png"
    arguments = ["plan", "--model", str(tmp_path), *sizes, "--sweep", "--json", "--chart", str(chart)]
    assert cli.main(arguments) == 0
    found = json.loads(capfd.readouterr().out)
    rows = found["combinations"]
    # Of 1 and 3 ranks: 8 experts and 4 heads aren't divided by 3.
    assert [(r["expert_parallel_size"], r["tensor_parallel_size"]) for r in rows] == [(1, 1)] * 3
    assert {(r["offload_optimizer"], r["offload_parameters"]) for r in rows} == {
        (False, False),
        (True, False),
        (True, True),
    }
    times = [row["seconds_per_million_tokens"] for row in rows]
    assert times == sorted(times)
    held = {(r["offload_optimizer"], r["offload_parameters"]): r["between_steps_gib"] for r in rows}
    assert held[False, False] > held[True, False] > held[True, True]
    reasons = [row["reason"] for row in found["impossible"]]
    assert len(reasons) == 9
    assert all("doesn't divide" in reason for reason in reasons)
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_holds_too_much_is_told_without_a_rehearsal(tmp_path):
    tiny("glm").save_pretrained(tmp_path)
    setup = Setup(model=str(tmp_path), devices=2, expert_parallel_size=2)
    found = swept(setup, replace(SMALL, memory_gib=1e-6), fixed={"expert_parallel_size", "tensor_parallel_size"})
    assert found["combinations"] == []
    assert len(found["impossible"]) == 9
    assert all("GiB more than an small has, between steps" in row["reason"] for row in found["impossible"])
    assert all(row["over_gib"] > 0 for row in found["impossible"])


def test_between_known_lengths():
    totals = {1024: 100, 4096: 400, 16384: 1600}
    assert longest_within(totals, 400) == 4096
    assert longest_within(totals, 700) == 7168
    assert longest_within(totals, 5000) == 16384
    assert longest_within(totals, 99) is None


def test_closer_lengths_find_the_longest(tmp_path, monkeypatch):
    """Of memory that grows with the square of the length, which straight lines overestimate."""
    asked: list[int] = []

    def totals(_setup, _shape, _structure, lengths):
        asked.extend(lengths)
        return {length: length**2 for length in lengths}

    monkeypatch.setattr(longest, "_totals", totals)
    monkeypatch.setattr(longest, "find_structure", lambda _: None)
    tiny("glm").save_pretrained(tmp_path)
    setup = Setup(model=str(tmp_path))
    gpu = replace(SMALL, memory_gib=10_000**2 / 2**30)
    found = longest.longest_that_fits(setup, shape_of(tiny("glm")), gpu)
    best = found["longest_sequence_length"]
    assert best % longest.BLOCK == 0
    assert 0.97 * 10_000 <= best <= 10_000
    assert len(asked) == len(set(asked))


@pytest.mark.slow
def test_ranks_from_one_set_up(tmp_path):
    tiny("glm").save_pretrained(tmp_path)
    setup = Setup(model=str(tmp_path), devices=2, expert_parallel_size=2, sequence_length=48)
    found = scaled(setup, (1, 2, 4, 64, 4096), GPUS["H200"])
    assert [point["ranks"] for point in found["points"]] == [2, 4, 64, 4096]
    assert "aren't whole nodes" in found["impossible"][0]["reason"]
    held = [point["elements_per_rank"] for point in found["points"]]
    assert held == sorted(held, reverse=True)
    assert found["points"][-1]["elements_per_rank"] < found["points"][0]["elements_per_rank"] / 100


@pytest.mark.slow
def test_the_longest_of_a_tiny_model(tmp_path, capfd):
    tiny("glm").save_pretrained(tmp_path)
    assert cli.main(["plan", "--model", str(tmp_path), "--devices", "2", "--max", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["longest_sequence_length"] == found["setup"]["sequence_length"]
    assert found["fits"]
