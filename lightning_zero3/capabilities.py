"""What the installed DeepSpeed already does, found by reading its code objects, not its version number.

Each :class:`UpstreamFix` is one thing that this package works around: where, why, how it is detected and what ends it.
A part steps aside where upstream has the fix, and where upstream no longer calls what the part hangs on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class UpstreamFix:
    """One fault or gap upstream that this package handles until upstream does.

    Args:
        name: The switch or part that handles it.
        symbol: The upstream symbol.
        reason: What is wrong there.
        affected: Releases in which it was seen.
        mended: Reads the given upstream class and tells whether upstream has the fix.
        hooks: Pairs of an upstream method and a method that it must call for our part to work. A tuple of callers
            means any one of them.
        expires: What makes our part superfluous.
    """

    name: str
    symbol: str
    reason: str
    affected: str
    mended: Callable[[type[Any]], bool]
    hooks: tuple[tuple[tuple[str, ...], str], ...]
    expires: str

    def missing_hooks(self, stage3: type[Any]) -> list[str]:
        """Calls that this part relies on and the given class doesn't make, in words."""
        return [
            f"{' or '.join(callers)} calling {callee}"
            for callers, callee in self.hooks
            if not hasattr(stage3, callee) or not any(_calls(stage3, caller, callee) for caller in callers)
        ]


def referenced_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names that a function's code refers to, nested functions included.

    DeepSpeed's ``instrument_w_nvtx`` wraps without setting ``__wrapped__``, so the wrapped function is taken out of
    the wrapper's closure.

    >>> def outer():
    ...     return len([abs(n) for n in ()])
    >>> sorted(referenced_names(outer) & {"len", "abs", "sum"})
    ['abs', 'len']
    """
    names: set[str] = set()
    pending: list[CodeType] = [_unwrapped(function).__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names)


def _unwrapped(function: Callable[..., Any]) -> FunctionType:
    found: Any = inspect.unwrap(function)
    while getattr(found, "__name__", "") == "wrapped_fn" and found.__closure__:
        inner = [cell.cell_contents for cell in found.__closure__ if inspect.isfunction(cell.cell_contents)]
        if len(inner) != 1:
            break
        found = inspect.unwrap(inner[0])
    if not inspect.isfunction(found):
        raise TypeError(f"{function!r} is no Python function, so its code can't be read.")
    return found


def clears_once_per_step(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class clears gradients in ``step`` and no longer per sub-group."""
    return "zero_grad" not in referenced_names(stage3._prepare_fp32_grad_for_sub_group)


def aliases_master_weights(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class compares devices in a way that can be true.

    The dead comparison is ``tensor.device == self.device`` with a string on the right. A mended one wraps the string
    in ``torch.device``, which then appears among the names next to ``device``.
    """
    source = inspect.getsource(_unwrapped(stage3._create_fp32_partitions))
    return "torch.device(self.device)" in source


def skips_invalid_norms(stage3: type[Any]) -> bool:
    """Whether a Stage-3 optimizer class takes a gradient norm that is no finite number for an overflow."""
    return "combine_grad_norm_groups" in referenced_names(stage3.step)


GRAD_CLEAR = UpstreamFix(
    name="scoped_grad_clear",
    symbol="DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group",
    reason="calls zero_grad, which visits every parameter, once per sub-group",
    affected="0.19.7 and earlier",
    mended=clears_once_per_step,
    hooks=(
        (("_prepare_sub_group",), "_prepare_fp32_grad_for_sub_group"),
        (("_prepare_fp32_grad_for_sub_group", "step"), "zero_grad"),
    ),
    expires="DeepSpeed >= 0.19.8 is the oldest that is supported",
)

MASTER_ALIAS = UpstreamFix(
    name="alias_master_weights",
    symbol="DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions",
    reason="compares a torch.device with a string, so the branch that shares weights and masters never runs",
    affected="0.19.8 and earlier",
    mended=aliases_master_weights,
    hooks=((("_setup_for_real_optimizer", "__init__"), "_create_fp32_partitions"),),
    expires="the oldest supported DeepSpeed compares devices and keeps offload and reload of shared storage exact",
)

INVALID_NORM = UpstreamFix(
    name="skip_invalid_norm",
    symbol="DeepSpeedZeroOptimizer_Stage3.step",
    reason="squares the -1 that stands for a norm that isn't finite, and updates the weights with NaNs",
    affected="0.19.7 and earlier",
    mended=skips_invalid_norms,
    hooks=((("step",), "_overflow_check_and_loss_scale_update"), (("step",), "_get_norm_groups")),
    expires="DeepSpeed >= 0.19.8 is the oldest that is supported",
)

UPSTREAM_FIXES = (GRAD_CLEAR, MASTER_ALIAS, INVALID_NORM)


def parts_to_leave_out(stage3: type[Any]) -> dict[str, str | None]:
    """Parts of our optimizer that must not act on a given upstream class.

    Args:
        stage3: ``DeepSpeedZeroOptimizer_Stage3`` of the installed DeepSpeed.

    Returns:
        Name of the part → what upstream lacks for it, or None where upstream has the fix itself.
    """
    left_out: dict[str, str | None] = {}
    for fix in UPSTREAM_FIXES:
        missing = fix.missing_hooks(stage3)
        if missing:
            left_out[fix.name] = ", ".join(missing)
        elif fix.mended(stage3):
            left_out[fix.name] = None
    return left_out


def _calls(stage3: type[Any], caller: str, callee: str) -> bool:
    return hasattr(stage3, caller) and callee in referenced_names(getattr(stage3, caller))
