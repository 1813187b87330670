# SPDX-License-Identifier: Apache-2.0
"""What mixins over a Trainer's ``DeepSpeedStrategy`` know of the class that they are mixed into.

Two of Lightning's packages have one, so none of them is a base class here: for a type checker ``TrainerMixin`` is
Lightning's, when it runs it is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from lightning_zero3.config import Zero3Options

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_zero3.topology import Topology

    class TrainerMixin(DeepSpeedStrategy):
        """Lightning's class, with what the strategies of this package have in common."""

        upstream: ClassVar[type[Any]]
        options: Zero3Options
        config: Any

        @property
        def parallel_layout(self) -> Topology:
            """Which ranks share experts and layers."""

else:
    TrainerMixin = object
