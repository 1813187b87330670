# SPDX-License-Identifier: Apache-2.0
"""The version stands in ``lightning_zero3/__about__.py``; what has to repeat it says the same."""

from __future__ import annotations

import re
from datetime import date

import pytest
import yaml

from lightning_zero3 import __version__, cli
from tests.release.distributions import ROOT

HEADINGS = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_it_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", __version__)


def test_the_changelog_has_a_section_for_it():
    assert HEADINGS[0] == "Unreleased"
    if ".dev" in __version__:
        return
    version, _, day = HEADINGS[1].partition(" - ")
    assert version == __version__
    assert date.fromisoformat(day).isoformat() == day


def test_the_citation_is_of_the_latest_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    version, _, day = HEADINGS[1].partition(" - ")
    assert (citation["version"], citation["date-released"].isoformat()) == (version, day)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{citation["license"]}"' in project
    assert [f'name = "{author["name"]}"' for author in citation["authors"] if author["name"] not in project] == []
    assert citation["repository-code"] in project


def test_where_a_page_names_a_file_or_a_requirement_it_is_this_version():
    # lightning_zero3-1.2.3.tar.gz, lightning_zero3==1.2.3, lightning-zero3 v1.2.3.
    said = re.compile(r"lightning[_-]zero3\W{1,3}v?(\d+\.\d+[\w.]*\d)")
    assert said.findall("`lightning_zero3==0.0.1`, lightning_zero3-0.0.2rc1.tar.gz") == ["0.0.1", "0.0.2rc1"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    repeated = {str(page): set(said.findall(page.read_text())) for page in pages}
    assert {page: found for page, found in repeated.items() if not found <= {__version__}} == {}


def test_the_command_says_it(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith(f" {__version__}\n")
