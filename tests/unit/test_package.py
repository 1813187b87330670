"""What importing the package does and doesn't do."""

import json
import os
import subprocess
import sys
import textwrap

import lightning_zero3

PROBE = """
import json, sys, time
import lightning.pytorch
registered_before = set(lightning.pytorch.strategies.StrategyRegistry)
modules_before = set(sys.modules)
import lightning_zero3
from lightning.pytorch.strategies import StrategyRegistry
print(json.dumps({
    "new": sorted(set(sys.modules) - modules_before),
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
    assert seen["registered"] == ["zero3_fast", "zero3_fast_offload"]
    assert seen["heavy"] == []
    # Counted, not timed: what comes on top of Lightning's own import is this package and psutil.
    foreign = {name.split(".")[0].lstrip("_") for name in seen["new"]} - {"lightning_zero3"}
    assert foreign <= {"psutil", "resource", "cpu"}, foreign


def test_every_public_name_is_there():
    for name in lightning_zero3.__all__:
        assert getattr(lightning_zero3, name) is not None
    assert lightning_zero3.FastStage3Optimizer.__name__ == "FastStage3Optimizer"
