# SPDX-License-Identifier: Apache-2.0
"""Each source file says its licence, also where it is copied to."""

from __future__ import annotations

import ast

from tests.release.distributions import ROOT

HEADER = "# SPDX-License-Identifier: Apache-2.0"


def test_each_source_file_begins_with_its_licence(distributions):
    # The sdist's: all that is in the repository, and nothing that is made from it.
    sources = sorted(name for name in distributions.in_the_sdist() if name.endswith((".py", ".sh", ".sbatch")))
    folders = {name.partition("/")[0] for name in sources}
    assert {"lightning_zero3", "recipes", "tests", "benchmarks", "docs", "dashboards"} <= folders
    missing = []
    for name in sources:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        first = [line for line in lines[:2] if not line.startswith("#!")][:1]
        if first != [HEADER]:
            missing.append(name)
    assert missing == [], f"put {HEADER!r} first"


def test_the_licence_stands_before_docstrings_which_stay_docstrings(distributions):
    modules = {name: text for name, text in distributions.in_the_wheel().items() if name.endswith(".py")}
    assert [name for name, text in modules.items() if ast.get_docstring(ast.parse(text)) is None] == []
