"""Write the pages that are made from the code: ``python docs/generate.py``."""

import re
from pathlib import Path

from lightning_zero3 import precision
from lightning_zero3.capabilities import combinations
from lightning_zero3.metrics import reference

if __name__ == "__main__":
    Path(__file__).with_name("combinations.md").write_text(combinations.markdown())
    Path(__file__).with_name("metrics.md").write_text(reference.markdown())
    page = Path(__file__).with_name("precision.md")
    # The table alone is made; what stands around it is written by hand.
    page.write_text(re.sub(r"(?m)^\| asked for by (.*\n)(\|.*\n)*", lambda _: precision.markdown(), page.read_text()))
