# SPDX-License-Identifier: Apache-2.0
"""The pools of ranks that tests share."""

import os

import pytest

from tests.ranks import ENVIRONMENT, RankPool


def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.slow
def test_a_pool_starts_with_the_suites_environment_whatever_a_test_has_set(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    monkeypatch.setenv("SET_BY_A_TEST", "1")
    pool = RankPool(1)
    try:
        (seen,) = pool.run(environment)
    finally:
        pool.close()
    assert seen["TORCH_EXTENSIONS_DIR"] == ENVIRONMENT["TORCH_EXTENSIONS_DIR"] != "/elsewhere"
    assert "SET_BY_A_TEST" not in seen
