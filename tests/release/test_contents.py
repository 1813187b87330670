# SPDX-License-Identifier: Apache-2.0
"""What is in the wheel and in the sdist, and what their metadata say."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser

import pytest

from lightning_zero3 import __version__
from tests.release.distributions import ROOT, build, files

LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)#]+)[^)]*\)")
HOME = "https://github.com/lightning-zero3/lightning-zero3"


def test_the_wheel_has_what_is_run_read_and_copied_and_nothing_else(distributions):
    found = set(distributions.in_the_wheel())
    metadata = {name for name in found if name.startswith(f"lightning_zero3-{__version__}.dist-info/")}
    assert {name.partition("/")[2] for name in metadata} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    expected = {f"lightning_zero3/{name}" for name in files(ROOT / "lightning_zero3")}
    expected |= {f"lightning_zero3/recipes/{name}" for name in files(ROOT / "recipes")}
    expected |= {f"lightning_zero3/dashboards/{name}" for name in files(ROOT / "dashboards" / "grafana")}
    assert found - metadata == expected
    assert {
        "lightning_zero3/py.typed",
        "lightning_zero3/recipes/glm45air.py",
        "lightning_zero3/recipes/shared/recipe.py",
        "lightning_zero3/recipes/configs/glm45air_4x8.yaml",
        "lightning_zero3/recipes/launch/slurm.sbatch",
        "lightning_zero3/dashboards/zero3.json",
    } <= found


def test_a_script_can_be_executed_from_the_wheel(distributions):
    with zipfile.ZipFile(distributions.wheel) as archive:
        mode = archive.getinfo("lightning_zero3/recipes/launch/torchrun.sh").external_attr >> 16
    assert mode & 0o111 == 0o111


def test_the_sdist_has_every_file_of_the_repository_and_no_other(distributions):
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository here: this is an sdist itself")

    def listed(*options: str) -> set[str]:
        done = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=True)
        return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}

    found = distributions.in_the_sdist() - {"PKG-INFO"}
    assert listed() <= found
    # What isn't committed yet, and isn't ignored, counts.
    assert found <= listed("--cached", "--others", "--exclude-standard")


def test_a_wheel_from_the_sdist_is_the_wheel(distributions, tmp_path):
    (tmp_path / "sdist").mkdir()
    source = distributions.unpacked(tmp_path / "sdist")
    (again,) = build(source, tmp_path / "wheel", "--target", "wheel")
    with zipfile.ZipFile(again) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == distributions.in_the_wheel()


def test_an_editable_install_takes_the_recipes_of_the_clone(tmp_path):
    command = [sys.executable, "-c", f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"]
    subprocess.run(command, cwd=ROOT, check=True)
    with zipfile.ZipFile(next(tmp_path.iterdir())) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert content == {"_lightning_zero3.pth": str(ROOT).encode()}


def test_metadata(distributions):
    said = HeaderParser().parsestr(distributions.metadata())
    assert (said["Name"], said["Version"]) == ("lightning_zero3", __version__)
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Description-Content-Type"] == "text/markdown"
    extras = set(said.get_all("Provides-Extra"))
    assert {"recipes", "pretrained", "dashboards", "test"} <= extras
    scripts = distributions.in_the_wheel()[f"lightning_zero3-{__version__}.dist-info/entry_points.txt"].decode()
    assert "lightning-zero3 = lightning_zero3.cli:main" in scripts


def test_the_readme_on_a_package_index_leads_to_this_releases_files(distributions):
    links = LINK.findall(distributions.metadata().partition("\n\n")[2])
    assert len(links) > 20
    ours = []
    for image, target in links:
        assert target.startswith("https://"), target
        kind = "raw" if image else "blob"
        if target.startswith(f"{HOME}/"):
            ours.append(target)
            assert target.startswith(f"{HOME}/{kind}/v{__version__}/"), target
            assert (ROOT / target.partition(f"/v{__version__}/")[2]).exists(), target
    assert len(ours) > 20
