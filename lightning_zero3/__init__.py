# SPDX-License-Identifier: Apache-2.0
"""A fast ZeRO Stage 3 strategy with expert parallelism for PyTorch Lightning.

Importing this package registers ``"zero3_fast"``, ``"zero3_fast_offload"`` and ``"zero3_stock"`` for Trainer and
Fabric, also those of ``pytorch_lightning`` and ``lightning_fabric``. It imports no DeepSpeed and changes nothing in
DeepSpeed, Lightning or Transformers.
"""

from __future__ import annotations

import os.path
import sys
from typing import TYPE_CHECKING, Any

from lightning_zero3.__about__ import __version__
from lightning_zero3.config import STOCK, ConfigConflictError, Zero3Options

# The doctor has to run, and to say what is wrong, where torch or Lightning can't be imported. A recipe is a process of
# its own, which imports them once.
_WITHOUT_STRATEGIES = os.path.basename(sys.argv[0]) == "lightning-zero3" and sys.argv[1:2] in (["doctor"], ["recipe"])

if TYPE_CHECKING or not _WITHOUT_STRATEGIES:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zero3.checkpoints.manifest import DamagedCheckpointError
    from lightning_zero3.checkpoints.saver import CheckpointNotSavedError
    from lightning_zero3.fabric.strategy import Zero3FastFabricStrategy
    from lightning_zero3.metrics.callback import Zero3Monitor
    from lightning_zero3.metrics.profile import Zero3Profile
    from lightning_zero3.moe.peer_batches import PeerBatchesError
    from lightning_zero3.optimizer.layer_norms import grad_norms
    from lightning_zero3.refusals import UnsupportedFeatureError
    from lightning_zero3.registries import register_in_other_packages
    from lightning_zero3.same_batches import UnequalBatchesError
    from lightning_zero3.save_hugging_face import SaveHuggingFace
    from lightning_zero3.strategy import Zero3FastStrategy

    Zero3FastStrategy.register_strategies(StrategyRegistry)
    Zero3FastFabricStrategy.register_strategies(STRATEGY_REGISTRY)
    register_in_other_packages()

if TYPE_CHECKING:
    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

__all__ = [
    "STOCK",
    "CheckpointNotSavedError",
    "ConfigConflictError",
    "DamagedCheckpointError",
    "FastStage3Optimizer",
    "PeerBatchesError",
    "SaveHuggingFace",
    "UnequalBatchesError",
    "UnsupportedFeatureError",
    "Zero3FastFabricStrategy",
    "Zero3FastStrategy",
    "Zero3Monitor",
    "Zero3Options",
    "Zero3Profile",
    "__version__",
    "grad_norms",
]


def __getattr__(name: str) -> Any:
    """Import the optimizer, and DeepSpeed with it, when someone asks for it."""
    if name == "FastStage3Optimizer":
        from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

        return FastStage3Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
