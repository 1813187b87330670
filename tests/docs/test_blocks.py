# SPDX-License-Identifier: Apache-2.0
"""Every code block of every page: it is of a known kind, can be read, and runs or says why it can't."""

from __future__ import annotations

import ast
import json
import subprocess

import pytest
import torch
import yaml

from tests.docs import running
from tests.docs.blocks import LANGUAGES, ROOT, RUN, Block, blocks_of, pages
from tests.docs.commands import check, commands

WITH_BLOCKS = [page for page in pages() if blocks_of(page)]


def to_run(page: str, language: str, *, slow: bool) -> list[Block]:
    """Blocks of a page that are run, with the slow ones or without."""
    return [
        block
        for block in blocks_of(page)
        if block.language == language and block.reason is None and (slow or not block.slow)
    ]


def is_slow(page: str) -> bool:
    return any(block.slow for block in blocks_of(page))


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_can_be_read(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.place}: ```{block.language}: one of {', '.join(LANGUAGES)}"
        if block.language == "python":
            ast.parse(block.source, block.place)
        elif block.language == "yaml":
            assert yaml.safe_load(block.source), block.place
        elif block.language == "json":
            assert json.loads(block.source), block.place
        elif block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.source, text=True, capture_output=True, check=False)
            assert read.returncode == 0, f"{block.place}: {read.stderr}"
        if block.language in ("bash", "console"):
            assert commands(block), block.place
            for command in commands(block):
                check(command, page)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Trainer would take the GPU, and ranks of the tests are gloo's")
@pytest.mark.parametrize("page", [page for page in pages() if to_run(page, "python", slow=False)])
def test_python_runs(page, ranks, tmp_path):
    ranks(1).run(running.run_python, to_run(page, "python", slow=False), str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a Trainer would take the GPU, and ranks of the tests are gloo's")
@pytest.mark.parametrize("page", [page for page in pages() if is_slow(page)])
def test_all_of_a_page_runs(page, ranks, tmp_path):
    running.write_files(blocks_of(page), running.like_the_repository(tmp_path))
    if python := to_run(page, "python", slow=True):
        ranks(1).run(running.run_python, python, str(tmp_path))
    for block in to_run(page, "bash", slow=True):
        running.run_commands(block, tmp_path)


def test_commands_say_how_they_are_tested_and_nothing_else_than_code_does():
    for page in WITH_BLOCKS:
        for block in blocks_of(page):
            said = block.slow or block.reason is not None
            assert said or block.language != "bash", f"{block.place}: slow, or not run and why"
            assert not said or block.language in RUN, block.place


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (["lightning-zero3", "plan", "--recipes", "glm45air"], "recipes"),
        (["python", "recipes/glm45air.py", "--max_step", "3"], "max_step"),
        (["python", "recipes/glm45.py"], "glm45"),
        (["python", "benchmarks/step_cost.py", "--rank", "3"], "--rank"),
        (["make", "tests"], "tests"),
        (["pytest", "tests/docs/test_blocks.py::test_nothing"], "test_nothing"),
        (["rm", "-r", "runs"], "rm"),
    ],
)
def test_wrong_commands_are_found(command, wrong):
    with pytest.raises(Exception, match=wrong):
        check(command, "README.md")
