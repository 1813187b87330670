# SPDX-License-Identifier: Apache-2.0
"""Experts that aren't trained, as under LoRA, in DeepSpeed's checkpoints of AutoEP's layers.

Upstream symbols: ``DeepSpeedEngine._save_moe_checkpoint``, with ``_validate_autoep_zero3_partitioned_metadata``, which
it calls between its check and what it saves, and ``_autoep_expert_parameter_names`` (0.19.7, 0.19.8). Reason: it
refuses frozen experts, for they "are not stored in ZeRO optimizer shards". Nor are other frozen weights: each rank's
part of them is in its model file (``frozen_param_fragments``), the experts' too, and is loaded from there. Detected by
tests: a fit goes on to the bit. Expires when upstream saves frozen experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_zero3.moe.weight_names import EXPERTS
from lightning_zero3.substitution import substituted


@contextmanager
def saved_as_other_weights(engine: Any) -> Iterator[None]:
    """Let an engine save frozen experts, for the length of its ``save_checkpoint``.

    Args:
        engine: DeepSpeed's engine.
    """
    parameters = dict(engine.module.named_parameters())
    frozen = {name: p for name, p in parameters.items() if name.endswith(tuple(EXPERTS)) and not p.requires_grad}
    kind: Any = next((each for each in type(engine).__mro__ if "_save_moe_checkpoint" in vars(each)), None)
    if not frozen or kind is None:
        yield
        return
    validate, names_of = kind._validate_autoep_zero3_partitioned_metadata, kind._autoep_expert_parameter_names

    def refreeze(*arguments: Any, **named: Any) -> Any:
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        return validate(*arguments, **named)

    def trained(*arguments: Any, **named: Any) -> set[str]:
        # Asked for what must be in the optimizer's files.
        return {name for name in names_of(*arguments, **named) if name not in frozen}

    with ExitStack() as scope:
        scope.enter_context(substituted(kind, "_validate_autoep_zero3_partitioned_metadata", staticmethod(refreeze)))
        scope.enter_context(substituted(kind, "_autoep_expert_parameter_names", staticmethod(trained)))
        for parameter in frozen.values():
            scope.callback(parameter.requires_grad_, False)
            parameter.requires_grad_(True)
        yield
