# SPDX-License-Identifier: Apache-2.0
"""The optimizer's switches, as its parts read them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero3.config import Zero3Options


@dataclass(frozen=True)
class Switches:
    """Which parts of the optimizer are on. Each can be switched alone, for an A/B on the same machine.

    The names are those of the parts in :mod:`lightning_zero3.capabilities.fixes`; ``step_bytes_budget`` is an option of
    ``batch_optimizer_step``.
    """

    scoped_grad_clear: bool = True
    alias_master_weights: bool = True
    coalesce_grad_norms: bool = True
    batch_optimizer_step: bool = True
    coalesce_persistent_gather: bool = True
    skip_redundant_release: bool = True
    bucket_per_process_group: bool = True
    lean_hooks: bool = True
    lean_linear: bool = True
    step_bytes_budget: int | None = None
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
        """Take the optimizer's switches out of the strategy's options."""
        return cls(
            scoped_grad_clear=options.scoped_grad_clear,
            alias_master_weights=options.alias_master_weights,
            coalesce_grad_norms=options.coalesce_grad_norms,
            batch_optimizer_step=options.batch_optimizer_step,
            coalesce_persistent_gather=options.coalesce_persistent_gather,
            skip_redundant_release=options.skip_redundant_release,
            bucket_per_process_group=options.bucket_per_process_group,
            lean_hooks=options.lean_hooks,
            lean_linear=options.lean_linear,
            step_bytes_budget=options.step_bytes_budget,
            skip_invalid_norm=not options.stock_semantics,
            lower_the_scale=not options.stock_semantics,
            move_exactly=not options.stock_semantics,
            keep_edits=not options.stock_semantics,
            zero_missing_gradients=not options.stock_semantics,
            refuse_unfrozen=not options.stock_semantics,
            accumulate_backwards=not options.stock_semantics,
            keep_partial_gradients=not options.stock_semantics,
            align_swapped_gradients=not options.stock_semantics,
        )
