# SPDX-License-Identifier: Apache-2.0
"""Write the pages that are made from the code: ``python docs/generate.py``."""

from __future__ import annotations

import re
from pathlib import Path

import command_pages
import option_page

from lightning_zero3 import precision
from lightning_zero3.capabilities import combinations
from lightning_zero3.metrics import reference

FOLDER = Path(__file__).parent


def pages() -> dict[str, str]:
    """What each page that is made from the code should say."""
    by_hand = (FOLDER / "precision.md").read_text()
    return {
        "combinations.md": combinations.markdown(),
        "commands.md": command_pages.markdown(),
        "metrics.md": reference.markdown(),
        "options.md": option_page.markdown(),
        # The table alone is made; what stands around it is written by hand.
        "precision.md": re.sub(r"(?m)^\| asked for by (.*\n)(\|.*\n)*", lambda _: precision.markdown(), by_hand),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
