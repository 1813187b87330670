# SPDX-License-Identifier: Apache-2.0
"""What is built once for all of these tests."""

import pytest

from tests.release.distributions import ROOT, Distributions, build


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The wheel and the sdist of this tree."""
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"))
    return Distributions(wheel, sdist)
