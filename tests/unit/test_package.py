# SPDX-License-Identifier: Apache-2.0
"""What importing the package does and doesn't do."""

import json
import os
import subprocess
import sys
import textwrap

import lightning_zero3
from lightning_zero3.registries import register_in_other_packages

PROBE = """
import json, sys, time
import lightning.pytorch
registered_before = set(lightning.pytorch.strategies.StrategyRegistry)
modules_before = set(sys.modules)
import lightning_zero3
from lightning.pytorch.strategies import StrategyRegistry
from lightning.fabric.strategies import STRATEGY_REGISTRY
other_packages = sorted({"pytorch_lightning", "lightning_fabric"} & set(sys.modules))
modules_after, waiting = set(sys.modules), [type(finder).__name__ for finder in sys.meta_path]
# Ours first, as sorted imports have it: it imports theirs, which would register what isn't there yet.
from lightning_zero3.pytorch_lightning import Zero3FastStrategy
import pytorch_lightning
import lightning_fabric
print(json.dumps({
    "new": sorted(modules_after - modules_before),
    "other_packages": other_packages,
    "waiting": [waiting.count("_WaitsForRegistries"), len(waiting) - len(sys.meta_path)],
    "fabric": [name for name in STRATEGY_REGISTRY if name.startswith("zero3")],
    "pytorch_lightning": [n for n in pytorch_lightning.strategies.StrategyRegistry if n.startswith("zero3")],
    "lightning_fabric": [n for n in lightning_fabric.strategies.STRATEGY_REGISTRY if n.startswith("zero3")],
    "heavy": sorted({m.split(".")[0] for m in sys.modules} & {"deepspeed"}),
    "registered": sorted(set(StrategyRegistry) - registered_before),
}))
"""


def probe() -> dict:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE)], capture_output=True, text=True, check=True, env=os.environ
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_import_registers_the_strategies_and_loads_nothing_heavy():
    seen = probe()
    assert seen["registered"] == ["zero3_fast", "zero3_fast_offload", "zero3_stock"]
    assert seen["heavy"] == seen["other_packages"] == []
    # Imported afterwards, the other packages have them too, and nothing is left on sys.meta_path.
    for package in ("fabric", "pytorch_lightning", "lightning_fabric"):
        assert seen[package] == ["zero3_fast", "zero3_fast_offload", "zero3_stock"]
    assert seen["waiting"] == [1, 1]
    # Counted, not timed: what comes on top of Lightning's own import is this package and psutil.
    foreign = {name.split(".")[0].lstrip("_") for name in seen["new"]} - {"lightning_zero3"}
    assert foreign <= {"psutil", "resource", "cpu"}, foreign


def test_what_is_imported_before_is_registered_in_at_once():
    import pytorch_lightning.strategies

    registry, finders = pytorch_lightning.strategies.StrategyRegistry, list(sys.meta_path)
    registry.remove("zero3_fast")
    register_in_other_packages()
    assert registry["zero3_fast"]["strategy"] is lightning_zero3.pytorch_lightning.Zero3FastStrategy
    assert sys.meta_path == finders


def test_every_public_name_is_there():
    for name in lightning_zero3.__all__:
        assert getattr(lightning_zero3, name) is not None
    assert lightning_zero3.FastStage3Optimizer.__name__ == "FastStage3Optimizer"
