# SPDX-License-Identifier: Apache-2.0
"""The optimizer's switches, as its parts read them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_zero3.config import StepSwitches, Zero3Options


@dataclass(frozen=True, kw_only=True)
class Switches(StepSwitches):
    """Which parts of the optimizer are on. Each can be switched alone, for an A/B on the same machine.

    The names are those of the parts in :mod:`lightning_zero3.capabilities.fixes`; ``step_bytes_budget`` is an option of
    ``batch_optimizer_step``. What is declared here corrects numbers, and has no option of its own.
    """

    skip_invalid_norm: bool = True
    lower_the_scale: bool = True
    move_exactly: bool = True
    keep_edits: bool = True
    zero_missing_gradients: bool = True
    refuse_unfrozen: bool = True
    accumulate_backwards: bool = True
    keep_partial_gradients: bool = True
    align_swapped_gradients: bool = True

    @classmethod
    def from_options(cls, options: Zero3Options) -> Switches:
        """Take the optimizer's switches out of the strategy's options.

        >>> corrected, stock = (Switches.from_options(Zero3Options(stock_semantics=each)) for each in (False, True))
        >>> corrected == Switches(), stock.keep_edits, stock.lean_hooks
        (True, False, True)
        """
        chosen = {field.name: getattr(options, field.name) for field in fields(StepSwitches)}
        corrections = {field.name for field in fields(cls)} - chosen.keys()
        return cls(**chosen, **dict.fromkeys(corrections, not options.stock_semantics))
