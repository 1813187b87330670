"""The optimizer's switches, as its parts read them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero3.config import Zero3Options


@dataclass(frozen=True)
class Switches:
    """Which parts of the optimizer are on. Each can be switched alone, for an A/B on the same machine.

    The names are those of the parts in :mod:`lightning_zero3.capabilities`.
    """

    scoped_grad_clear: bool = True
    alias_master_weights: bool = True
    skip_invalid_norm: bool = True
    move_exactly: bool = True
    keep_edits: bool = True
    zero_missing_gradients: bool = True
    refuse_unfrozen: bool = True

    @classmethod
    def from_options(cls, options: Zero3Options) -> Switches:
        """Take the optimizer's switches out of the strategy's options."""
        return cls(
            scoped_grad_clear=options.scoped_grad_clear,
            alias_master_weights=options.alias_master_weights,
            skip_invalid_norm=not options.stock_semantics,
            move_exactly=not options.stock_semantics,
            keep_edits=not options.stock_semantics,
            zero_missing_gradients=not options.stock_semantics,
            refuse_unfrozen=not options.stock_semantics,
        )
