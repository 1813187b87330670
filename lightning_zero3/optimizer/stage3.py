# SPDX-License-Identifier: Apache-2.0
"""``FastStage3Optimizer``: DeepSpeed's Stage-3 optimizer with this package's parts on top.

Importing this module imports DeepSpeed; the package's ``__init__`` therefore doesn't.
"""

from __future__ import annotations

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_zero3.optimizer.accumulation import AccumulateGradients
from lightning_zero3.optimizer.edits import KeepEdits
from lightning_zero3.optimizer.fast_step import FastStep
from lightning_zero3.optimizer.grad_census import CountGradClears
from lightning_zero3.optimizer.grad_clear import ScopedGradClear
from lightning_zero3.optimizer.grad_scaler import ScalerBacksOff
from lightning_zero3.optimizer.gradient_buckets import BucketPerProcessGroup
from lightning_zero3.optimizer.invalid_norm import SkipInvalidNorm
from lightning_zero3.optimizer.lean_gradients import LeanGradients
from lightning_zero3.optimizer.lean_hooks import LeanHooks
from lightning_zero3.optimizer.lean_linear import LeanLinear
from lightning_zero3.optimizer.master_alias import MasterAlias
from lightning_zero3.optimizer.missing_gradients import MissingGradients
from lightning_zero3.optimizer.moving import MoveStates
from lightning_zero3.optimizer.setters import SettersReachWeights
from lightning_zero3.optimizer.swapped_gradients import SwappedGradients
from lightning_zero3.optimizer.switches import Switches


class FastStage3Optimizer(
    ScopedGradClear,
    CountGradClears,
    SkipInvalidNorm,
    ScalerBacksOff,
    AccumulateGradients,
    BucketPerProcessGroup,
    LeanHooks,
    LeanLinear,
    FastStep,
    MissingGradients,
    KeepEdits,
    SettersReachWeights,
    SwappedGradients,
    MoveStates,
    MasterAlias,
    LeanGradients,
    DeepSpeedZeroOptimizer_Stage3,  # type: ignore[misc]
):
    """A ``DeepSpeedZeroOptimizer_Stage3`` with a fast step, the scoped gradient clear and master-weight aliasing.

    The census stands below the scoped clear, so that it counts the visits that are left.

    DeepSpeed's engine builds it, with upstream's arguments. Its switches are bound to a subclass beforehand
    (:meth:`with_switches`), because the engine knows nothing of them.
    """

    switches = Switches()

    @classmethod
    def with_switches(cls, switches: Switches) -> type[FastStage3Optimizer]:
        """A subclass of the same name on which the given switches are set.

        Args:
            switches: Which parts are on.
        """
        return type(cls.__name__, (cls,), {"switches": switches, "__doc__": cls.__doc__, "__module__": cls.__module__})
