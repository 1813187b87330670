"""Write the pages that are made from the code: ``python docs/generate.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # its neighbours, where it is loaded by its path

import command_pages  # noqa: E402
import option_page  # noqa: E402

from lightning_zero3 import combinations, precision  # noqa: E402
from lightning_zero3.metrics import reference  # noqa: E402


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
