# SPDX-License-Identifier: Apache-2.0
"""``fabric.save`` and ``fabric.load``: Fabric's hooks about checkpoints.

Upstream symbols: ``lightning.fabric.utilities.load._move_state_into`` (Lightning 2.6.6), as Lightning's own strategies
put what was loaded into the user's dict; ``DeepSpeedEngine.save_checkpoint``, replaced on one engine for the length of
a save, because Fabric's hook calls it and has no other place for a writer. A missing name raises. Expires when
Fabric's strategies can say how an engine saves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero3.checkpoints import loading
from lightning_zero3.checkpoints.consolidated import load_consolidated
from lightning_zero3.checkpoints.saver import Request, Saver, layout_of, only_upstream_can_save
from lightning_zero3.checkpoints.sharded_weights import client_state
from lightning_zero3.config import Zero3Options
from lightning_zero3.fabric.steps import SteppedEngine, SteppedOptimizer, drop_saved_state
from lightning_zero3.substitution import substituted
from lightning_zero3.topology import Topology


class FabricCheckpoints:
    """Mixin over a ``DeepSpeedStrategy`` of Fabric's: states of a step that isn't complete, and weights alone."""

    options: Zero3Options
    parallel_layout: Topology
    global_rank: int
    load_full_weights: bool
    num_processes: int
    _timeout: timedelta | None
    _stepped: tuple[SteppedEngine, ...] = ()

    def _of(self, engine: Any) -> SteppedEngine | None:
        return next((each for each in self._stepped if each.engine is engine), None)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """As Lightning's, with the engine's micro-steps and the token counts of a step that isn't complete.

        Args:
            path: A folder.
            state: One model that was set up with its optimizer, perhaps the optimizer, and anything else.
            storage_options: Refused by Lightning.
            filter: Refused by Lightning.

        Raises:
            RuntimeError: The model has no optimizer, or a later setup has taken it over.
            CheckpointNotSavedError: On all ranks, if it failed on any.
        """
        if not self.options.stock_semantics:
            # Without an engine, or with two, Lightning says so.
            for engine in _engines_in(state)[:1]:
                state = {**state, **self._required(engine).saved_state()}
            # An optimizer's states are its engine's to save.
            state = {name: value for name, value in state.items() if not isinstance(value, SteppedOptimizer)}
        with ExitStack() as scope:
            for engine in [] if self.options.stock_semantics else _engines_in(state)[:1]:
                scope.enter_context(substituted(engine, "save_checkpoint", partial(self._save, engine)))
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]

    def _save(
        self, engine: Any, path: Any, *, client_state: dict[str, Any], tag: str, exclude_frozen_parameters: bool
    ) -> None:
        """In place of ``engine.save_checkpoint``, as Lightning's ``save_checkpoint`` calls it."""
        upstreams = only_upstream_can_save(engine)
        with substituted(engine, "save_checkpoint", partial(type(engine).save_checkpoint, engine)):
            if upstreams is not None:
                rank_zero_warn(upstreams)
                engine.save_checkpoint(
                    path, client_state=client_state, tag=tag, exclude_frozen_parameters=exclude_frozen_parameters
                )
                return
            Saver(self._timeout).save(
                engine,
                Request(
                    path=Path(os.path.abspath(path)),
                    client_state=client_state,
                    layout=layout_of(self.parallel_layout),
                    exclude_frozen=exclude_frozen_parameters,
                    ranks_here=self.num_processes,
                ),
            )

    def _required(self, engine: Any) -> SteppedEngine:
        stepped = self._of(engine)
        if stepped is None:
            raise RuntimeError(
                "fabric.save of a model that was set up without an optimizer, or that a later setup has taken over: a "
                "sharded checkpoint holds optimizer states. Save what fabric.setup(model, optimizer) returned."
            )
        return stepped

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning's; without an optimizer in ``state`` weights alone, with masters if there are any.

        Args:
            path: A folder; or a file, for ``fabric.load_raw`` and with ``load_full_weights=True``.
            state: One model that was set up, perhaps its optimizer, and anything else.
            strict: Whether names that only one of both has are an error.
            weights_only: As Lightning's, for a file.

        Returns:
            What else is in the checkpoint.

        Raises:
            UnfitCheckpointError: The checkpoint's weights don't belong to this model or this layout of ranks.
            RuntimeError: With ``strict``: names that only one of both has.
        """
        engines = _engines_in(state) if isinstance(state, dict) else []
        if self.options.stock_semantics or self.load_full_weights or len(engines) != 1:
            as_lightning: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
            return as_lightning
        rest: dict[str, Any]
        if any(isinstance(value, SteppedOptimizer) for value in state.values()):
            rest = super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
            self._required(engines[0]).restore(rest)
        else:
            rest = self._load_weights(path, state, engines[0].module, strict)
        drop_saved_state(rest)
        return rest

    def _load_weights(self, path: Any, state: dict[str, Any], module: nn.Module, strict: bool) -> dict[str, Any]:
        from lightning.fabric.utilities.load import _move_state_into

        place, trust = loading.find_together(path), self.options.trust_checkpoint
        rest = client_state(
            loading.read_weights(module, place, self.parallel_layout, self.global_rank, strict=strict, trust=trust)
        )
        _move_state_into(source=rest, destination=state, keys=set(rest) & set(state))
        return rest

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict into partitions and masters.

        Args:
            module: An engine; or any module, as Lightning does.
            state_dict: Names as in the module's own state dict, tensors of whole parameters.
            strict: Whether missing and unexpected names are an error.
        """
        engines = _engines_in({"": module})
        load_consolidated(engines[0].module if engines else module, state_dict, strict)


def _engines_in(state: Mapping[str, Any]) -> list[Any]:
    from deepspeed import DeepSpeedEngine

    return [value for value in state.values() if isinstance(value, DeepSpeedEngine)]
