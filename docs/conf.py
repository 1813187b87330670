# SPDX-License-Identifier: Apache-2.0
"""The site: ``make docs``. Pages are plain Markdown, which GitHub shows as well; all that only a site needs is here.

The repository is the source folder, so that a link from a page to README.md, a recipe or a script is the same on GitHub
and here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lightning_zero3 import __version__

# Autodoc imports the optimizer, and DeepSpeed with it; pages are built on machines with and without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

project = "lightning_zero3"
author = "The lightning_zero3 maintainers"
version = release = __version__
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/launch/README.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/data", "docs/_templates"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin at any level, as GitHub allows
highlight_language = "none"  # of blocks without a language: they are output

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
napoleon_google_docstring = True

html_theme = "furo"
html_title = f"lightning_zero3 {release}"
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}  # the home page is docs/index.html, as in the repository
html_copy_source = False

# Pages whose links are the site's navigation.
NAVIGATION = ("docs/index", "docs/upstream/README")
LINK = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<page>[\w./-]+)\.(?:md|rst)\)")


def toctrees(text: str, folder: str) -> str:
    """A hidden table of contents for each section of a page: the pages that it links to, by the words that it says."""
    made: list[str] = []
    listed: set[str] = set()
    for section in re.split(r"(?m)^## ", text):
        heading, _, rest = section.partition("\n")
        caption = "" if section.startswith("# ") else f":caption: {heading}\n"
        entries = []
        for title, link in LINK.findall(rest):
            page = os.path.normpath(os.path.join(folder, link))
            if page not in listed:
                listed.add(page)
                # A title with markup is taken from the page itself.
                entries.append(f"/{page}" if "`" in title else f"{title} </{page}>")
        if entries:
            made.append("\n".join(["```{toctree}", f":hidden:\n{caption}", *entries, "```\n"]))
    return "\n".join(made)


def add_navigation(_: Any, page: str, source: list[str]) -> None:
    """Sphinx's event ``source-read``."""
    if page in NAVIGATION:
        source[0] += "\n" + toctrees(source[0], str(Path(page).parent))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
