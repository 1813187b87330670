# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed: nothing of the repository is used, and nothing but packages is claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics
from lightning_zero3.recipe_files import recipe_names
from tests.distributed.test_launchers import environment
from tests.release.distributions import ROOT, files

# Another program's module of this name must stay what it is.
SCRIPT = """
import sys, types
mine = types.ModuleType("shared"); mine.__file__ = "/somewhere/else.py"
if {foreign}: sys.modules["shared"] = mine
before = list(sys.path)
from lightning_zero3 import recipe_files
for name in recipe_files.recipe_names():
    recipe = recipe_files.load_recipe(name)
    settings = recipe_files.recipe_settings(name, ["--size", "full", "--layers", "4"])
    assert recipe.RECIPE.config(settings).num_hidden_layers == 4
    assert sys.modules.get("shared") is (mine if {foreign} else None)
    assert not [module for module in sys.modules if module.startswith("shared.")]
assert sys.path == before
print(recipe_files.recipes_directory())
"""
SMALL = ("--max_steps", "2", "--sequence_length", "32", "--micro_batch_size", "1", "--max_tokens", "20000")


def run(site: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, with the package that is in ``site``."""
    variables = environment(PYTHONPATH=str(site), PATH=f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("wheel", "foreign"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_from_a_clone_and_from_a_wheel_no_name_is_claimed(distributions, tmp_path, foreign, wheel):
    home, recipes = ROOT, ROOT / "recipes"
    if wheel:
        home, recipes = tmp_path, tmp_path / "lightning_zero3" / "recipes"
        with zipfile.ZipFile(distributions.wheel) as archive:
            archive.extractall(home)
        assert {path.name.partition("-")[0] for path in home.iterdir()} == {"lightning_zero3"}
    done = run(home, home, sys.executable, "-c", SCRIPT.format(foreign=foreign))
    assert done.stdout == f"{recipes}\n"


@pytest.fixture(scope="module")
def site(distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the wheel into; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(distributions.wheel)], check=True, capture_output=True)
    return folder


def losses(run_folder: Path) -> dict[int, float]:
    return read_metrics(run_folder / "metrics.csv")[names.LOSS]


@pytest.mark.slow
def test_an_installed_recipe_trains_in_two_processes_and_writes_where_it_is_started(site, tmp_path):
    before = files(site)
    done = run(site, tmp_path, "lightning-zero3", "recipe", "glm45air", *SMALL)
    assert "on each of 2 ranks" in done.stdout
    trained = tmp_path / "runs" / "glm45air" / "version_0"
    assert (trained / "chart.png").is_file()
    assert files(site) == before

    # The same by torchrun, and by a copy: the same losses.
    script = run(site, tmp_path, "lightning-zero3", "recipe", "--path", "glm45air").stdout.strip()
    assert Path(script).is_relative_to(site)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run(site, tmp_path, *torchrun, script, *SMALL, "--output", "by_torchrun")
    copied = run(site, tmp_path, "lightning-zero3", "recipe", "glm45air", "--copy", "mine").stdout.strip()
    assert copied == "mine/glm45air.py"
    run(site, tmp_path, sys.executable, copied, *SMALL, "--output", "by_a_copy")
    expected = losses(trained)
    assert len(expected) == 2
    assert losses(tmp_path / "by_torchrun" / "version_0") == losses(tmp_path / "by_a_copy" / "version_0") == expected


@pytest.mark.slow
def test_an_installed_recipe_says_its_options_and_can_be_planned(site, tmp_path):
    listed = json.loads(run(site, tmp_path, "lightning-zero3", "recipe", "--json").stdout)
    assert list(listed["recipes"]) == recipe_names()
    said = run(site, tmp_path, "lightning-zero3", "recipe", "qwen35", "--help").stdout
    assert "--max_steps" in said
    config = Path(listed["folder"], "configs", "glm45air_4x8.yaml")
    printed = run(site, tmp_path, "lightning-zero3", "recipe", "glm45air", "--config", str(config), "--print_config")
    assert "expert_parallel_size: 8" in printed.stdout
    plan = ("lightning-zero3", "plan", "--recipe", "glm45air", "--rehearse=false", "--json")
    assert json.loads(run(site, tmp_path, *plan).stdout)["model_parameters"] == 106_852_245_504
    assert list(tmp_path.iterdir()) == []
