# SPDX-License-Identifier: Apache-2.0
"""What all tests share: rank pools, a private folder for compiled ops, and a watch on the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import ENVIRONMENT, RankPool

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The Makefile's folder: builds for one torch release, shared by all ranks and tests of this environment.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
ENVIRONMENT.update(os.environ)

# Set by libraries on import, by Lightning for its children, or by cpu_ops.prepare so that a build works (PATH,
# TORCH_EXTENSIONS_DIR); they are put back after each test all the same.
_SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TF2_BEHAVIOR",
    "TRITON_CACHE_DIR",
    "OMP_NUM_THREADS",
    "PATH",
    "TORCH_EXTENSIONS_DIR",
    "LC_CTYPE",
    "NCCL_CUMEM_ENABLE",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    # Lightning's launcher, in the process that would start the others.
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "WORLD_SIZE",
}


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves environment variables behind."""
    before = dict(os.environ)
    yield
    monkeypatch.undo()
    after = dict(os.environ)
    changed = {name for name in before | after if before.get(name) != after.get(name)} - _SET_BY_LIBRARIES
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"left behind in the environment: {sorted(changed)}"


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """``ranks(2)`` is a pool of two real gloo ranks, started when first asked for."""

    def get(world_size: int) -> RankPool:
        # On DeepSpeed releases whose gathers race with gloo, `make test-versions` allows one rank.
        if world_size > int(os.environ.get("RANKS_AT_MOST", world_size)):
            pytest.skip(f"needs {world_size} ranks")
        return _pools.setdefault(world_size, RankPool(world_size))

    return get


@pytest.fixture(autouse=True)
def _no_copies_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning starts other ranks by running the same command again; under pytest that is the whole suite."""
    launchers = sys.modules.get("lightning.pytorch.strategies.launchers.subprocess_script")
    if launchers is not None:
        original = launchers._SubprocessScriptLauncher._call_children_scripts

        def only_this_process(self: Any) -> None:
            assert self.num_processes == 1, "a test starts this pytest command again as another rank"
            original(self)

        monkeypatch.setattr(launchers._SubprocessScriptLauncher, "_call_children_scripts", only_this_process)


@pytest.fixture
def async_io(ranks: Callable[[int], RankPool]) -> None:
    """Skip a test where DeepSpeed can't swap to files."""
    from tests.engines import async_io_works

    if not ranks(1).run(async_io_works)[0]:
        pytest.skip("DeepSpeed's async_io can't be built here: install libaio-dev")
