# SPDX-License-Identifier: Apache-2.0
"""Steps under Fabric: the user's own loop decides when one is taken, the engine is told.

Upstream symbols: ``_FabricOptimizer`` (Lightning 2.6.6), which borrows the class of what it wraps, so that for example
``zero_grad`` runs with the wrapper as ``self`` and resets counters where nothing reads them; and which steps the engine
only if that has an optimizer's attributes. DeepSpeed's engine (0.19.7, 0.19.8) has none, so stock steps the optimizer
past its engine: counts, schedulers and gradient accumulation never move. Detected by tests. Expires when Fabric calls
the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.config import ConfigConflictError
from lightning_zero3.moe import router
from lightning_zero3.optimizer.layer_norms import grad_norms
from lightning_zero3.refusals import UnsupportedFeatureError
from lightning_zero3.stepping import micro_steps
from lightning_zero3.stepping.micro_steps import MicroSteps


class SteppedEngine:
    """One engine that is trained under Fabric.

    Without ``gradient_accumulation_steps`` in the DeepSpeed config every backward adds, and ``optimizer.step()`` steps,
    as with any other of Fabric's strategies. With it the engine divides losses and counts: ``optimizer.step()`` is
    called after every backward, and updates at each N-th call.

    Args:
        engine: DeepSpeed's engine, with an optimizer.
        bias_speed: ``router_bias_update_speed``, or None.
    """

    def __init__(self, engine: Any, bias_speed: float | None) -> None:
        self.engine = engine
        self.counts = engine.gradient_accumulation_steps() > 1
        self.last_step_was_skipped = False
        self._micro_steps = MicroSteps(engine)
        self._router_biases = None if bias_speed is None else router.RouterBiases(engine, bias_speed)
        self._clips_to = engine.optimizer.clip_grad
        self._waits_for_step = False

    @contextmanager
    def backward(self, more_to_come: bool) -> Iterator[dict[str, Any]]:
        """Around ``engine.backward``; gives its further arguments.

        Args:
            more_to_come: Whether the user has said, by ``no_backward_sync``, that this isn't a step's last.

        Raises:
            RuntimeError: The engine counts micro-steps, and one was left out.
        """
        if self.counts:
            if self._waits_for_step:
                raise RuntimeError(
                    f"gradient_accumulation_steps is {self.engine.gradient_accumulation_steps()} in the DeepSpeed "
                    "config, so the engine counts: call optimizer.step() after every fabric.backward(). Or leave the "
                    "entry out, divide losses yourself and call optimizer.step() when a step is complete."
                )
            self._waits_for_step = True
            yield {}
            return
        # Where it may turn out afterwards which backward was the last, nothing is gained by knowing.
        known = False if more_to_come and not self._micro_steps.boundary_comes_late() else None
        with self._micro_steps.backward(known):
            yield {"scale_wrt_gas": False}

    def step(self) -> None:
        """Take a step, or count a micro-step."""
        engine = self.engine
        if not self.counts:
            self._micro_steps.close()
        self._waits_for_step = False
        steps = engine.global_steps
        engine.step()
        if self._router_biases is not None:
            self._router_biases.step_ended()
        self.last_step_was_skipped = engine.global_steps != steps and not engine.was_step_applied()
        if engine.global_steps != steps:
            engine.optimizer.clip_grad = self._clips_to
        if self.last_step_was_skipped:
            rank_zero_warn(
                f"Optimizer step {engine.global_steps} was skipped: a gradient is infinite or no number. Weights stay "
                "as they are; fabric.strategy.last_step_was_skipped tells, for schedulers and counters of your own."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; where the engine counts, those of a step that isn't complete stay.

        Args:
            set_to_none: As upstream's.
        """
        if not self.counts or self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0:
            self.engine.optimizer.zero_grad(set_to_none)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Have the next step clip gradients, as the engine does by itself with ``gradient_clipping``.

        Args:
            max_norm: The most that the norm of all gradients may be.
            norm_type: 2.
            error_if_nonfinite: Whether a norm that is no finite number is an error.

        Returns:
            The norm before clipping.

        Raises:
            UnsupportedFeatureError: Another norm, or a layout in which the norm isn't known before the step.
            ConfigConflictError: The config clips to another norm.
            RuntimeError: The norm isn't finite.
        """
        in_config = "{'gradient_clipping': " + f"{max_norm}" + "} in the DeepSpeed config"
        if norm_type != 2 or not max_norm > 0:
            raise UnsupportedFeatureError(
                f"clip_gradients(max_norm={max_norm}, norm_type={norm_type}): DeepSpeed clips within its step, by the "
                "2-norm of all gradients, to a number above 0. Pass another max_norm and leave norm_type out."
            )
        if self._clips_to not in (0, max_norm):
            raise ConfigConflictError(
                f"clip_gradients(max_norm={max_norm}), but the DeepSpeed config sets gradient_clipping to "
                f"{self._clips_to}. Leave one of them out."
            )
        try:
            norms = grad_norms(self.engine.module)
        except NotImplementedError as error:
            raise UnsupportedFeatureError(
                f"clip_gradients(max_norm={max_norm}) returns the norm before the step, which isn't known here: {error}"
                f" Put {in_config} and leave the call out."
            ) from error
        norm = norms.get("grad_2.0_norm_total", torch.zeros((), device=self.engine.device))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of all gradients is {norm.item()}, so they can't be clipped. Pass error_if_nonfinite=False "
                "to have the step skipped instead."
            )
        self.engine.optimizer.clip_grad = float(max_norm)
        return norm

    def saved_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside DeepSpeed's own states."""
        state: dict[str, Any] = {micro_steps.SAVED: self._micro_steps.saved_state()}
        if self._router_biases is not None:
            state[router.SAVED] = self._router_biases.saved_state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint that has been loaded into the engine.

        Args:
            state: What else was in the checkpoint.
        """
        self._micro_steps.restore(state.get(micro_steps.SAVED))
        if self._router_biases is not None:
            self._router_biases.restore(state)

    def close(self) -> None:
        """Stop counting tokens: the engine has ended."""
        if self._router_biases is not None:
            self._router_biases.close()


def drop_saved_state(state: dict[str, Any]) -> None:
    """Take out of a checkpoint's entries what isn't the user's.

    Args:
        state: The entries.
    """
    for name in (micro_steps.SAVED, router.SAVED):
        state.pop(name, None)


class SteppedOptimizer(torch.optim.Optimizer):
    """What Fabric wraps in place of the Stage-3 optimizer; methods may be called with the wrapper as ``self``.

    An ``Optimizer`` by class, so that torch's schedulers take it; everything else is the Stage-3 optimizer's.

    Args:
        stepped: Its engine.
    """

    def __init__(self, stepped: SteppedEngine) -> None:
        self.stepped = stepped

    def __getattr__(self, name: str) -> Any:
        if name == "stepped":  # a copy in the making
            raise AttributeError(name)
        return getattr(self.stepped.engine.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        """Take a step, or count a micro-step.

        Args:
            closure: Runs forward and backward first, once.
        """
        result = None if closure is None else closure()
        self.stepped.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients.

        Args:
            set_to_none: As upstream's.
        """
        self.stepped.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """This rank's part of the states."""
        return self.stepped.engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load this rank's part of the states.

        Args:
            state_dict: From :meth:`state_dict`, of every rank.
        """
        return self.stepped.engine.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused.

        Args:
            param_group: As torch's.

        Raises:
            UnsupportedFeatureError: Always.
        """
        raise UnsupportedFeatureError(
            "add_param_group: ZeRO Stage 3 has no place for parameters that come later. Give all parameters to the "
            "optimizer before fabric.setup(), those that are to rest in a group of their own with lr=0."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.stepped.engine.optimizer).__name__})"
