# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 doctor``, as a user starts it: in a process of its own, with one thing really wrong each time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_zero3.capabilities.fixes import GRAD_CLEAR, MASTER_ALIAS, RELEASE, UPSTREAM_FIXES
from lightning_zero3.capabilities.probing import UpstreamLimit
from lightning_zero3.cpu_ops import OP_NAME
from lightning_zero3.doctor import machine, report, upstream, versions
from lightning_zero3.doctor.process import Answers
from tests.ranks import ROOT

# As pip's console script does; no run comes near the limit, which is there to show that none hangs.
START = "import sys; sys.argv[0] = 'lightning-zero3'; from lightning_zero3.cli import main; sys.exit(main())"
BOUND_SECONDS = 150


def run(*options: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    before = [str(path)] if path is not None else []
    return subprocess.run(
        [sys.executable, "-c", START, "doctor", *options],
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*before, str(ROOT)]), **environment},
    )


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(found: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [problem for problem in found["problems"] if text in problem["what"]]


def test_where_everything_is_there_it_trains_and_says_how_it_knows() -> None:
    done = run("--json")
    found = found_by(done)
    assert done.returncode == 0, found["problems"]
    assert found["can_train"] is True
    assert found["trial"]["result"]["optimizer"] == "FastStage3Optimizer"
    assert not [problem for problem in found["problems"] if problem["fatal"]]
    assert {"torch", "deepspeed", "lightning", "transformers"} <= {p["name"] for p in found["packages"] if p["version"]}
    assert [fix["name"] for fix in found["fixes"]] == [fix.name for fix in UPSTREAM_FIXES]
    for fix in found["fixes"]:
        assert fix["upstream"] in ("has the fix", "lacks it"), fix
        assert fix["symbol"] in fix["how"]
    (recorders,) = (limit for limit in found["limits"] if limit["name"] == "output recorders")
    if recorders["present"]:  # Transformers 5.23 and later
        (problem,) = problems(found, "output recorders")
        assert problem["fatal"] is False
        assert "nothing to do, mended here" in problem["remedy"]
    assert OP_NAME in {op["name"] for op in found["ops"]}
    assert found["accelerator"]["devices"]
    assert {row["what"]: row["works"] for row in found["combinations"]}["CPU, gloo"] is True


def test_a_lock_that_nobody_holds_is_named_before_anything_can_wait_for_it(tmp_path: Path) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    done = run(TORCH_EXTENSIONS_DIR=str(tmp_path), COLUMNS="500")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"delete it: rm {lock}" in done.stdout
    assert "no process has it open" in done.stdout
    assert "not tried: it would wait for the build lock" in done.stdout
    assert lock.exists()


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended(tmp_path: Path) -> None:
    lock = tmp_path / OP_NAME / "lock"
    lock.parent.mkdir()
    # Held by this process, as a build of another run would: it isn't stale, and the trial waits for it.
    with lock.open("x"):
        done = run("--json", "--timeout=9", TORCH_EXTENSIONS_DIR=str(tmp_path))
        assert lock.exists()
    found = found_by(done)
    assert done.returncode == 1
    assert found["trial"]["reason"].startswith("it was ended after 9 s")
    (problem,) = problems(found, str(lock))
    assert f"process {os.getpid()}" in problem["what"]
    assert problem["fatal"] is False


@pytest.mark.slow
def test_a_step_that_fails_for_real_and_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    ninja = shutil.which("ninja")
    assert ninja is not None
    (programs / "ninja").symlink_to(ninja)
    no_folder = tmp_path / "a file"
    no_folder.touch()
    done = run("--json", PATH=str(programs), TORCH_EXTENSIONS_DIR=str(no_folder))
    found = found_by(done)
    assert done.returncode == 1
    assert str(no_folder) in found["trial"]["reason"]
    (fatal,) = (problem for problem in found["problems"] if problem["fatal"])
    assert found["trial"]["reason"] in fatal["what"]
    (compiler,) = problems(found, "C++ compiler")
    assert "no c++ in PATH" in compiler["what"]
    assert "apt-get install g++" in compiler["remedy"]
    assert not problems(found, "ninja: ")


# Python imports it when it starts; the doctor's child does too.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("blocked", ["lightning", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_package_that_is_missing_is_named_with_the_remedy(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked={blocked}))
    done = run("--json", path=tmp_path)
    found = found_by(done)
    assert done.returncode == 1
    assert found["can_train"] is False
    (missing,) = problems(found, f"{blocked} is missing")
    assert missing["remedy"].startswith(f"pip install '{blocked}")


def test_without_what_the_command_itself_needs_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked={"jsonargparse"}))
    done = run(path=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "lightning-zero3: No module named 'jsonargparse': pip install jsonargparse\n"


def test_a_time_that_can_not_be() -> None:
    done = run("--timeout=0")
    assert done.returncode == 2
    assert done.stderr == "lightning-zero3: --timeout 0: a number of seconds above 0.\n"


class ClearsPerSubGroup(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        self.zero_grad(set_to_none=True)


class LaidOutInAnotherWay(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    def step(self, closure: Any = None) -> None:
        pass


def test_a_deepspeed_without_a_fix_and_one_of_an_unknown_layout() -> None:
    (fix,) = upstream.fixes(ClearsPerSubGroup, [GRAD_CLEAR])
    assert (fix["upstream"], fix["ours"]) == ("lacks it", True)
    assert fix["how"].endswith("no longer per sub-group: no")
    (fix,) = upstream.fixes(LaidOutInAnotherWay, [RELEASE])
    assert (fix["upstream"], fix["ours"]) == ("unknown layout", False)
    assert "step calling _partition_all_parameters" in fix["missing"]
    answers = Answers(sections={"fixes": [fix], "trial": {}})
    found = report.assemble([], [], {}, [], answers, [])
    (problem,) = problems(found, "laid out in another way")
    assert problem["fatal"] is False
    assert found["can_train"] is True


def test_code_that_can_not_be_read_is_an_unknown_layout() -> None:
    built: Any = type("Built", (DeepSpeedZeroOptimizer_Stage3,), {"_create_fp32_partitions": len})
    (fix,) = upstream.fixes(built, [MASTER_ALIAS])
    assert fix["upstream"] == "unknown layout"


def test_a_pair_of_packages_that_can_not_be_tried_is_a_note_and_no_end() -> None:
    def broken() -> bool:
        raise RuntimeError("half an installation")

    limit = UpstreamLimit("two packages", "a.b", "is odd", "all", broken, "use others", "never")
    (seen,) = upstream.limits([limit])
    assert seen["present"] is None
    found = report.assemble([], [], {}, [], Answers(sections={"limits": [seen], "trial": {}}), [])
    (problem,) = problems(found, "two packages")
    assert "half an installation" in problem["remedy"]


def test_a_version_that_is_too_old() -> None:
    package = versions.Package("torch", "2.7.1", ">=2.8", "zero3_fast")
    found = report.assemble([package], [], {}, [], Answers(sections={"trial": {}}), [])
    assert found["can_train"] is False
    (problem,) = problems(found, "torch is 2.7.1, >=2.8 is needed")
    assert problem["remedy"] == "pip install 'torch>=2.8'"


def test_a_compiler_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    tool = machine.compiler()
    assert "no such target" in tool.problem
    assert tool.remedy


@pytest.mark.parametrize("said", ["g++ 'unbalanced", "no-such-compiler --fast"])
def test_a_compiler_that_can_not_be_read(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", said)
    tool = machine.compiler()
    assert tool.path is None
    assert tool.problem
    assert tool.remedy


def test_a_compiler_of_spaces_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "  ")
    spaces = machine.compiler()
    monkeypatch.delenv("CXX")
    assert spaces == machine.compiler()


def test_ports_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand\n"), ("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n")):
        (port / name).write_text(text)
    efa = tmp_path / "rdmap0" / "ports" / "1"
    efa.mkdir(parents=True)
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "rdmap0" / "device").mkdir()
    (tmp_path / "rdmap0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    assert machine.infiniband(tmp_path) == [
        {
            "device": "mlx5_0",
            "port": "1",
            "kind": "InfiniBand",
            "state": "4: ACTIVE",
            "rate": "400 Gb/sec (4X NDR)",
        },
        {"device": "rdmap0", "port": "1", "kind": "EFA", "state": "", "rate": ""},
    ]
    assert machine.infiniband(tmp_path / "none") == []
