# SPDX-License-Identifier: Apache-2.0
"""The constructor of both strategies, of Trainer and of Fabric: options and arguments in, one checked config out."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning_zero3 import ds_config
from lightning_zero3.config import STOCK, ConfigConflictError, Zero3Options


class OptionsOfAStrategy:
    """Mixin over a ``DeepSpeedStrategy`` of Lightning's: this package's options, and its names in a registry."""

    # Lightning's class that a strategy is made of.
    upstream: ClassVar[type[Any]]
    strategy_name = "zero3_fast"
    config: Any

    def __init__(
        self,
        config: str | Path | dict[str, Any] | None = None,
        *,
        scoped_grad_clear: bool = True,
        alias_master_weights: bool = True,
        coalesce_grad_norms: bool = True,
        batch_optimizer_step: bool = True,
        coalesce_persistent_gather: bool = True,
        skip_redundant_release: bool = True,
        bucket_per_process_group: bool = True,
        lean_hooks: bool = True,
        lean_linear: bool = True,
        step_bytes_budget: int | None = None,
        expert_parallel_size: int | None = None,
        expert_parallel_preset: str | None = None,
        router_bias_update_speed: float | None = None,
        tensor_parallel_size: int | None = None,
        verify_parallel: bool = False,
        async_save: bool = False,
        stock_semantics: bool = False,
        resume_layout: str | None = None,
        trust_checkpoint: bool = False,
        **deepspeed_arguments: Any,
    ) -> None:
        self.options = Zero3Options(
            scoped_grad_clear=scoped_grad_clear,
            alias_master_weights=alias_master_weights,
            coalesce_grad_norms=coalesce_grad_norms,
            batch_optimizer_step=batch_optimizer_step,
            coalesce_persistent_gather=coalesce_persistent_gather,
            skip_redundant_release=skip_redundant_release,
            bucket_per_process_group=bucket_per_process_group,
            lean_hooks=lean_hooks,
            lean_linear=lean_linear,
            step_bytes_budget=step_bytes_budget,
            expert_parallel_size=expert_parallel_size,
            expert_parallel_preset=expert_parallel_preset,
            router_bias_update_speed=router_bias_update_speed,
            tensor_parallel_size=tensor_parallel_size,
            verify_parallel=verify_parallel,
            async_save=async_save,
            stock_semantics=stock_semantics,
            resume_layout=resume_layout,
            trust_checkpoint=trust_checkpoint,
        )
        self._refuse_fixed_arguments(deepspeed_arguments)
        self._refuse_unknown_arguments(deepspeed_arguments)
        super().__init__(config=config, zero_optimization=True, stage=3, **deepspeed_arguments)  # type: ignore[call-arg]
        # Without a dict of the user's, Lightning has built one from the arguments, and they can't differ.
        from_user = config is not None or self.upstream.DEEPSPEED_ENV_VAR in os.environ
        given = self._not_at_default(deepspeed_arguments) if from_user else {}
        self.config = ds_config.complete(self.config, given, self.options, argument_defaults=self._upstream_defaults())
        if self.options.resume_layout and self.config.get("checkpoint", {}).get("load_universal"):
            raise ConfigConflictError(
                'resume_layout="universal" reads a sharded checkpoint, and checkpoint.load_universal in the DeepSpeed '
                "config one that ds_to_universal has made. Leave one of them out."
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``zero3_fast``, ``zero3_fast_offload`` and ``zero3_stock``.

        The last one is what to measure the others against: DeepSpeed's own Stage 3, with this package's timers, and on
        CPUs too.

        Args:
            strategy_registry: Lightning's registry of strategy names, the Trainer's or Fabric's.
        """
        strategy_registry.register(cls.strategy_name, cls, description="ZeRO Stage 3, fast step", override=True)
        strategy_registry.register(
            f"{cls.strategy_name}_offload",
            cls,
            description="ZeRO Stage 3, fast step, optimizer on the CPU",
            override=True,
            offload_optimizer=True,
        )
        strategy_registry.register(
            "zero3_stock", cls, description="ZeRO Stage 3, DeepSpeed's own step and numbers", override=True, **STOCK
        )

    @staticmethod
    def _refuse_fixed_arguments(arguments: dict[str, Any]) -> None:
        """Take out ``stage`` and ``zero_optimization`` where they say what is true anyway."""
        for name, fixed in (("stage", 3), ("zero_optimization", True)):
            if arguments.pop(name, fixed) != fixed:
                raise ConfigConflictError(f"zero3_fast always has {name}={fixed}: leave {name} out.")

    @classmethod
    def _refuse_unknown_arguments(cls, arguments: Mapping[str, Any]) -> None:
        known = [*(field.name for field in dataclasses.fields(Zero3Options)), *cls._upstream_defaults()]
        for name in arguments:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint}")

    @classmethod
    def _not_at_default(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that differ from ``DeepSpeedStrategy``'s defaults; LightningCLI passes all defaults explicitly."""
        defaults = cls._upstream_defaults()
        return {
            name: value for name, value in arguments.items() if value != defaults.get(name, inspect.Parameter.empty)
        }

    @classmethod
    def _upstream_defaults(cls) -> dict[str, Any]:
        parameters = inspect.signature(cls.upstream.__init__).parameters
        return {name: parameter.default for name, parameter in parameters.items()}
