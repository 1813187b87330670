# SPDX-License-Identifier: Apache-2.0
"""Add the grid's cells that have passed to the record: ``python docs/record_grid.py JUNIT.xml ...``.

The reports are pytest's: ``pytest -m "slow or not slow" tests/distributed/test_grid.py --junitxml JUNIT.xml``. A cell
that failed is taken out.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from lightning_zero3.capabilities import grid

if __name__ == "__main__":
    record = set(grid.passed())
    known = {cell.name for cell in grid.cells()}
    for report in sys.argv[1:]:
        for case in ElementTree.parse(report).iter("testcase"):
            found = re.fullmatch(rf"{grid.TEST.split('::')[1]}\[(.*)\]", case.get("name", ""))
            if found and found[1] in known:
                outcomes = {child.tag for child in case}
                if outcomes & {"failure", "error"}:
                    record.discard(found[1])
                elif "skipped" not in outcomes:
                    record.add(found[1])
    Path(grid.__file__).with_name("grid_passed.txt").write_text("".join(f"{name}\n" for name in sorted(record)))
    print(len(record), "cells in the record")
