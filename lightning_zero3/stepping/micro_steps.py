# SPDX-License-Identifier: Apache-2.0
"""Which backward is a step's last: Lightning or the user decides, DeepSpeed's engine is told.

Upstream symbols: ``DeepSpeedEngine.backward``, which divides a loss that Lightning has divided already,
``set_gradient_accumulation_boundary``, ``zenflow``, ``is_deepcompile_active`` and ``micro_steps`` (0.19.7, 0.19.8);
``fit_loop._should_accumulate`` and ``LightningOptimizer`` (Lightning 2.6.6). Left alone, the engine counts
micro-batches across epochs and Lightning within one. Detected by tests against a plain Trainer.
Expires when Lightning's strategy follows its own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn

# In what Lightning saves next to DeepSpeed's own states.
SAVED = "lightning_zero3_micro_steps"


class MicroSteps:
    """Tells an engine which micro-step is a step's last.

    With a Trainer's automatic optimization that is known before each backward. With manual optimization, and with
    Fabric, it isn't: every backward only adds, and what the engine does at a step's last backward is done when
    ``optimizer.step()`` is called.

    Args:
        engine: A DeepSpeed engine, with an optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @contextmanager
    def backward(self, last: bool | None) -> Iterator[None]:
        """Around ``engine.backward`` of one loss, which must not be divided once more (``scale_wrt_gas=False``).

        Args:
            last: Whether it is a step's last; None where that isn't known.
        """
        if last is not None:
            self._engine.set_gradient_accumulation_boundary(last)
            yield
            if not last:
                self._engine.step()  # counts and times the micro-step; it updates nothing
            return
        late = self.boundary_comes_late()
        self._engine.set_gradient_accumulation_boundary(not late)
        if late:
            self._engine.optimizer.begin_backward()
        yield

    def close(self) -> None:
        """Before ``engine.step``, where no backward was known to be the last: what a last one would have done."""
        if self.boundary_comes_late():
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.optimizer.finalize_gradient_accumulation_boundary()

    def saved_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside DeepSpeed's own states."""
        return {
            "micro_steps": self._engine.micro_steps,
            "partial_gradients": getattr(self._engine.optimizer, "has_gradients", False),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint that has been loaded into the engine.

        Args:
            state: From :meth:`saved_state`, or None for a checkpoint of stock Lightning's.
        """
        if state is None:
            return
        self._engine.micro_steps = state["micro_steps"]
        if state["partial_gradients"] and not getattr(self._engine.optimizer, "has_gradients", False):
            rank_zero_warn(
                "This checkpoint was saved between the micro-batches of one optimizer step, and their gradients don't "
                "fit this run's parameters or ranks. They are dropped: the next step is made of the micro-batches that "
                "are still to come."
            )

    def boundary_comes_late(self) -> bool:
        """Whether a step's last backward may turn out to be that afterwards."""
        # Not with an optimizer that isn't ours, or of a layout that ours doesn't know. And ZenFlow and
        # DeepCompile decide in backward what a step's last one does; there every backward may be it.
        engine = self._engine
        switches = getattr(engine.optimizer, "switches", None)
        ours = switches is not None and switches.accumulate_backwards
        return ours and not engine.zenflow and not engine.is_deepcompile_active()


def reach_the_optimizer(wrapper: LightningOptimizer) -> None:
    """Let methods called on Lightning's wrapper run on the optimizer itself.

    A ``LightningOptimizer`` inherits its optimizer's class, so that for example ``zero_grad`` runs with the wrapper as
    ``self`` and resets counters there, where nothing reads them.

    Args:
        wrapper: The wrapper of a DeepSpeed optimizer.
    """
    optimizer = wrapper.optimizer
    for name in dir(type(optimizer)):
        if (
            not name.startswith("_")
            and not hasattr(LightningOptimizer, name)
            and callable(getattr(type(optimizer), name))
        ):
            wrapper.__dict__[name] = getattr(optimizer, name)
