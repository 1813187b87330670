# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the pages: what is in them and how each is tested. Sybil finds them.

A block's language says what happens to it:

- ``python``: a page's blocks run in order, in one namespace and a folder of their own. One whose first line is
  ``# name.py`` is also written to that file.
- ``bash``: the lines run in that folder, which then looks like the repository; with ``make test-slow`` only.
- ``console``: commands after ``$``, and what they printed when it was measured. Commands are checked, output isn't.
- ``text``: output, or a picture. Nothing to run.
- ``yaml``, ``json``: are read. ``diff``: is tested in ``tests/test_upstream_scripts.py``.

A comment before a block, which readers don't see, says more. Commands need one of these, Python may have one:
``<!-- block: slow -->`` (runs with ``make test-slow`` only), ``<!-- block: not run, REASON -->``. Either is checked in
the default suite all the same. ``<!-- invisible-code-block: python`` holds Python that a page needs and that readers
don't.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sybil import Document, Region, Sybil
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "bash", "console", "text", "yaml", "json", "diff")
RUN = ("python", "bash")


def pages() -> list[str]:
    """All pages, by their paths from the repository's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in found)


@dataclass(frozen=True)
class Block:
    """One block.

    Args:
        page: Its page's path from the repository's root.
        line: The number of the line of its fence.
        language: The fence's, or an invisible block's.
        source: What it holds.
        slow: It runs in the slow suite only.
        reason: Why it isn't run; None for one that is.
    """

    page: str
    line: int
    language: str
    source: str
    slow: bool = False
    reason: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def _regions(document: Document) -> Iterator[Region]:
    fences = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
    comments = DirectiveInHTMLCommentLexer(r"block|invisible-code-block", arguments=r"[^\n]*?")
    for kind, lexer in (("fence", fences), ("comment", comments)):
        for found in lexer(document):
            yield Region(found.start, found.end, parsed=kind, lexemes=found.lexemes)


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """A page's blocks, in order.

    Raises:
        ValueError: A comment says something else than is known here, or no block follows it.
    """
    found: list[Block] = []
    pending: tuple[bool, str | None] | None = None
    for example in Sybil([_regions]).parse(ROOT / page):
        lexemes = example.region.lexemes
        if example.parsed == "fence" or lexemes["directive"] == "invisible-code-block":
            language = lexemes["language"] if example.parsed == "fence" else lexemes["arguments"]
            slow, reason = pending or (False, None)
            found.append(Block(page, example.line, language.strip(), str(lexemes["source"]), slow, reason))
            pending = None
            continue
        said = re.fullmatch(r"(slow)|not run, (\S.*)", lexemes["arguments"].strip())
        if said is None or pending is not None:
            raise ValueError(f"{page}:{example.line}: block: slow, or block: not run, REASON; then a block.")
        pending = (said[1] is not None, said[2])
    if pending is not None:
        raise ValueError(f"{page}: no block follows the last comment.")
    return tuple(found)
