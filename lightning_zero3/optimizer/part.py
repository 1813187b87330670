# SPDX-License-Identifier: Apache-2.0
"""What the optimizer's parts know of the class that they are mixed into, DeepSpeed's Stage-3 optimizer.

That has no types, and its module builds ops when it is imported, so it is no base class here: for a type checker
``OptimizerPart`` is a class that has everything, when it runs it is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class OptimizerPart(Any):  # type: ignore[misc]
        """A class of which nothing is known."""

else:
    OptimizerPart = object
